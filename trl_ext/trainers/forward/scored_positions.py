"""Only hidden states that predict a scored token reach the LM head.

TRL's fused head leaves out the others on GPUs with Triton; elsewhere it projects every position, prompts included, and
with a large vocabulary that is most of the work. A flat row knows its scored tokens before the forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_kept: ContextVar[torch.Tensor | None] = ContextVar("kept", default=None)
_MARK = "_trl_ext_keeps_positions"


def let_positions_be_chosen(model: Any) -> None:
    """Make `only_positions` work on a causal model; idempotent, and without effect outside of it.

    Args:
        model: Of transformers, without wrapper.
    """
    if not getattr(model.base_model, _MARK, False):
        setattr(model.base_model, _MARK, True)
        model.base_model.register_forward_hook(_choose)


@contextmanager
def only_positions(index: torch.Tensor) -> Iterator[None]:
    """Inside the block backbones return the hidden states of these positions of their one row: [1, len(index), H]."""
    token = _kept.set(index)
    try:
        yield
    finally:
        _kept.reset(token)


def _choose(_backbone: Any, _args: Any, output: Any) -> Any:
    index = _kept.get()
    if index is not None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, index)
    return output
