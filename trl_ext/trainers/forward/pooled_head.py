"""A reward model's scores of selected tokens of a flat row, computed in the model's own forward.

transformers scores every token and then picks one per row of the batch. A flat row has many ends, and only they need
a score. The call goes through the patched instance's `forward`, so that DDP, DeepSpeed, FSDP and PEFT, which wrap it,
see one normal forward.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from trl_ext.errors import PackingError
from trl_ext.packing.layout import FlatRow
from trl_ext.packing.ulysses import SequenceGroup, sum_over
from trl_ext.trainers.forward.calls import call_flat


def add_pooled_head(model: Any) -> None:
    """Make `model(..., pool_index=[N])` return [N, 1] scores of these tokens of a flat row; idempotent.

    `model` is an unwrapped sequence classification model of transformers. Without `pool_index` it works as before.

    Raises:
        PackingError: The model has no `score` on top of a backbone.
    """
    if getattr(model.forward, "__func__", None) is _forward:
        return
    if not isinstance(getattr(model, "score", None), torch.nn.Module) or model.base_model is model:
        raise PackingError(
            f"{type(model).__name__} has no layer `score` on top of a backbone, so single tokens cannot be scored. "
            "Set packing=False."
        )
    model.forward_padded = model.forward
    model.forward = MethodType(_forward, model)


def _forward(
    self: Any, *args: Any, pool_index: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    if pool_index is None:
        return self.forward_padded(*args, labels=labels, **kwargs)
    hidden = getattr(self, self.base_model_prefix)(*args, **kwargs)[0]
    scores = self.score(hidden[0].index_select(0, pool_index))
    return SequenceClassifierOutputWithPast(logits=scores)


def scored_token(ids: Sequence[int], pad_token_id: int | None) -> int:
    """Return the index of a sequence's scored token: the rightmost token that is not padding.

    The rule of transformers' sequence classification models: if the pad token is EOS, it is the token before EOS, and
    the first token if all are padding.
    """
    if pad_token_id is None:
        return len(ids) - 1
    return next((i for i in range(len(ids) - 1, 0, -1) if ids[i] != pad_token_id), 0)


def pooled_scores(
    model: Callable[..., Any], row: FlatRow, pool_index: torch.Tensor, group: SequenceGroup | None = None
) -> torch.Tensor:
    """Return the scores [N, 1] of the tokens at row indices `pool_index` [N], from one model call.

    Args:
        model: With `add_pooled_head`.
        row: The flat row.
        pool_index: [N] indices in the row.
        group: Processes with the same row, of which each forwards a part; or None.
    """
    here = tokens_here(row, pool_index, group)
    part = row.part(group)
    begin = 0 if group is None else group.rank * part.num_tokens
    scores = call_flat(model, part, pool_index=pool_index[here] - begin).logits
    return whole(scores, here, len(pool_index), group)


def tokens_here(row: FlatRow, pool_index: torch.Tensor, group: SequenceGroup | None) -> torch.Tensor:
    """Return which of these tokens are in this process's part of the flat row, as an index into `pool_index`."""
    everyone = torch.arange(len(pool_index), device=pool_index.device)
    if group is None:
        return everyone
    part = group.slice_of(row.num_tokens)
    return everyone[(pool_index >= part.start) & (pool_index < part.stop)]


def whole(values: torch.Tensor, here: torch.Tensor, count: int, group: SequenceGroup | None) -> torch.Tensor:
    """Combine the values of all processes of a group. Collective.

    Args:
        values: This process's.
        here: Index of this process's values among all.
        count: Values of all processes.
        group: The processes; or None.
    """
    if group is None:
        return values
    return sum_over(values.new_zeros(count, *values.shape[1:]).index_put((here,), values), group)
