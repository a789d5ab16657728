"""Call a model on several sequences, as one flat row or as a batch padded on the right, and record such calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from trl_ext.packing.attention import packed_forward
from trl_ext.packing.layout import FlatRow


def call_flat(model: Callable[..., Any], row: FlatRow, **options: Any) -> Any:
    """Call the model once on a flat row, with its segments instead of an attention mask."""
    with packed_forward():
        return model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            segments=row.table,
            use_cache=False,
            **row.inputs,
            **options,
        )


def right_padded(
    sequences: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, [B, longest]. Padding on the left would shift learned positions."""
    longest = max(map(len, sequences))
    ids = [[*s, *[pad_token_id] * (longest - len(s))] for s in sequences]
    mask = [[1] * len(s) + [0] * (longest - len(s)) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def calls_of(module: torch.nn.Module) -> Iterator[list[tuple[tuple[Any, ...], Any]]]:
    """Collect the positional arguments and the result of each of the module's forwards inside the block."""
    seen: list[tuple[tuple[Any, ...], Any]] = []
    handle = module.register_forward_hook(lambda _module, args, output: seen.append((args, output)))
    try:
        yield seen
    finally:
        handle.remove()


# The variable separates this thread's forward from other threads'. PyTorch's compiler cannot read it, and would split
# the graph of a decoding step in two; it reads the number instead, which is 0 during generation.
_kept: ContextVar[torch.Tensor | None] = ContextVar("kept", default=None)
_num_kept = 0
_MARK = "_trl_ext_keeps_positions"


def let_positions_be_chosen(model: Any) -> None:
    """Make `only_positions` work on an unwrapped causal model; idempotent, and without effect otherwise."""
    if not getattr(model.base_model, _MARK, False):
        setattr(model.base_model, _MARK, True)

        def choose(_backbone: Any, _args: Any, output: Any) -> Any:
            index = _kept.get() if _num_kept else None
            if index is not None:
                output.last_hidden_state = output.last_hidden_state.index_select(1, index)
            return output

        model.base_model.register_forward_hook(choose)


@contextmanager
def only_positions(index: torch.Tensor) -> Iterator[None]:
    """Make backbones return only these positions of their single row inside the block: [1, len(index), H]."""
    global _num_kept
    token = _kept.set(index)
    _num_kept += 1
    try:
        yield
    finally:
        _num_kept -= 1
        _kept.reset(token)
