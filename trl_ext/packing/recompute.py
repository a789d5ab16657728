"""Outputs of attention that a checkpointed layer keeps, so that its recompute does not attend again.

Queries, keys and values are computed again.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# PyTorch's operations and flash-attention's, of which each returns output and log-sum-exp.
_ATTENTION = re.compile(
    r"aten::_(scaled_dot_product|flash|efficient)\w*_attention(_for_cpu|_forward)?|torch_attn::_varlen_attn|"
    r"_?flash_attn\w*::(\w*_)?(fwd|forward)"
)


class KeptAttention(TorchDispatchMode):
    """The outputs of attention in one checkpointed layer, in the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[Any] = []
        self._next: int | None = None

    @contextmanager
    def used(self, within: AbstractContextManager, *, reads: bool) -> Iterator[None]:
        """Keep outputs inside the block, or take those that were kept."""
        self._next = 0 if reads else None
        token = _kept.set(self)
        try:
            with within:
                yield
        finally:
            _kept.reset(token)

    def output(self, attend: Callable[[], Any]) -> Any:
        """Return the output of a call, and keep it; or the one that was kept for this call."""
        if self._next is None:
            self._outputs.append(attend())
            return tree_map(_alias, self._outputs[-1])
        self._next += 1
        return tree_map(_alias, self._outputs[self._next - 1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the outputs of attention's operations, or return those that were kept."""
        is_attention = _ATTENTION.fullmatch(func._schema.name)
        return self.output(lambda: func(*args, **kwargs or {})) if is_attention else func(*args, **kwargs or {})


_kept: ContextVar[KeptAttention | None] = ContextVar("kept", default=None)


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x  # autograd writes its graph into what it is given


def checkpoint_contexts(within: Any = None) -> tuple[AbstractContextManager, ...]:
    """Return what `torch.utils.checkpoint` puts around a forward and its recomputation, inside what `within` makes."""
    kept, outer = KeptAttention(), within() if within else (nullcontext(), nullcontext())
    return kept.used(outer[0], reads=False), kept.used(outer[1], reads=True)


def merged_output(attend: Callable[[], Any]) -> Any:
    """Return what a call returns that is no single operation; that of the forward where it was kept."""
    kept = _kept.get()
    return attend() if kept is None else kept.output(attend)


def keeping_operations() -> AbstractContextManager[Any]:
    """Inside the block outputs of attention's operations are kept, or taken, where a layer does so."""
    return _kept.get() or nullcontext()
