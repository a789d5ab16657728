"""Attention outputs that a checkpointed layer stores, so that its recompute does not attend again.

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

# PyTorch's and flash-attention's operations; each returns output and log-sum-exp.
_ATTENTION = re.compile(
    r"aten::_(scaled_dot_product|flash|efficient)\w*_attention(_for_cpu|_forward)?|torch_attn::_varlen_attn|"
    r"_?flash_attn\w*::(\w*_)?(fwd|forward)"
)


class KeptAttention(TorchDispatchMode):
    """The attention outputs of one checkpointed layer, in the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[Any] = []
        self._next: int | None = None

    @contextmanager
    def used(self, within: AbstractContextManager, *, reads: bool) -> Iterator[None]:
        """Store outputs inside the block, or return the stored outputs."""
        self._next = 0 if reads else None
        token = _kept.set(self)
        try:
            with within:
                yield
        finally:
            _kept.reset(token)

    def output(self, attend: Callable[[], Any]) -> Any:
        """Compute and store the output of a call, or return the stored output."""
        if self._next is None:
            self._outputs.append(attend())
            return tree_map(_alias, self._outputs[-1])
        self._next += 1
        return tree_map(_alias, self._outputs[self._next - 1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Store the outputs of attention operations, or return the stored outputs."""
        is_attention = _ATTENTION.fullmatch(func._schema.name)
        return self.output(lambda: func(*args, **kwargs or {})) if is_attention else func(*args, **kwargs or {})


_kept: ContextVar[KeptAttention | None] = ContextVar("kept", default=None)


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x  # autograd writes its graph into the given tensor


def checkpoint_contexts(within: Any = None) -> tuple[AbstractContextManager, ...]:
    """Return `torch.utils.checkpoint`'s contexts for a forward and its recomputation, inside the ones of `within`."""
    kept, outer = KeptAttention(), within() if within else (nullcontext(), nullcontext())
    return kept.used(outer[0], reads=False), kept.used(outer[1], reads=True)


def merged_output(attend: Callable[[], Any]) -> Any:
    """Return the result of a call that is not a single operation, or its stored result."""
    kept = _kept.get()
    return attend() if kept is None else kept.output(attend)


def keeps_attention() -> bool:
    """Return True inside a layer that stores, or reads, the outputs of attention."""
    return _kept.get() is not None


def keeping_operations() -> AbstractContextManager[Any]:
    """Store or reuse the outputs of attention operations inside the block, if the layer does so."""
    return _kept.get() or nullcontext()
