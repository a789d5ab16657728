"""Sequences and the forwards that score them, flat or padded, at most so many tokens each.

What is scored of a sequence is what transformers' sequence classification models score: its rightmost token that is
not padding.

Legend: n sequences of one forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trl_ext.packing.layout import flatten
from trl_ext.packing.plan import PlannedRow, plan_rows
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.calls import right_padded
from trl_ext.trainers.forward.completions import renumbered
from trl_ext.trainers.forward.pairs import num_shared_tokens
from trl_ext.trainers.forward.pooled_head import pooled_scores, scored_token

Sequences = Sequence[list[int]]


def plan_packed(sequences: Sequences, groups: Sequence[Any] | None, max_tokens: int) -> list[PlannedRow]:
    """Plan flat rows of at most `max_tokens`, and one for each sequence that is longer.

    Args:
        sequences: Token ids.
        groups: One key per sequence; equal keys share the tokens that all of them begin with. None shares nothing.
        max_tokens: Most tokens of a row.
    """
    first: dict[Any, int] = {}
    shared: dict[Any, int] = {}  # leaves every member of a group a token of its own
    keys = range(len(sequences)) if groups is None else groups
    for i, (ids, group) in enumerate(zip(sequences, keys, strict=True)):
        head = first.setdefault(group, i)
        in_common = 0 if groups is None else num_shared_tokens(sequences[head], ids)
        shared[group] = min(shared.get(group, len(ids) - 1), in_common)
    items = [RowSize(first[g], shared[g], len(ids) - shared[g]) for ids, g in zip(sequences, keys, strict=True)]
    beginnings = {g: np.array(sequences[g][: shared[group]]) for group, g in first.items()}
    fitting = [i for i, item in enumerate(items) if item.length <= max_tokens]
    rows = renumbered(plan_rows([items[i] for i in fitting], max_tokens, beginnings), fitting) if fitting else []
    for i, item in enumerate(items):
        if item.length > max_tokens:
            rows += renumbered(plan_rows([item]), [i])
    return rows


def plan_padded(sequences: Sequences, max_tokens: int) -> list[list[int]]:
    """Plan batches of similar lengths, each of at most `max_tokens` with its padding, or of one longer sequence."""
    batches: list[list[int]] = []
    # Longest first: the first member is the width of its batch, and what does not fit fails at once.
    for i in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        if batches and len(sequences[batches[-1][0]]) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def score_packed(
    model: Callable[..., Any],
    row: PlannedRow,
    sequences: Sequences,
    pad_token_id: int,
    device: torch.device,
    group: SequenceGroup | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Return the sequences that end in a flat row, and their scores [n], by one model call.

    With `group` its processes have the same row, and each forwards a part of it.
    """
    own = [segment for segment in row.segments if not segment.is_prefix]
    places = [row.place(segment, scored_token(sequences[segment.item], pad_token_id)) for segment in own]
    flat = flatten(row, Ragged.of(sequences), device)
    scores = pooled_scores(model, flat, torch.tensor(places, device=device), group)
    return [segment.item for segment in own], scores[:, 0]


def score_padded(
    model: Callable[..., Any], batch: list[int], sequences: Sequences, pad_token_id: int, device: torch.device
) -> tuple[list[int], torch.Tensor]:
    """Return the sequences of a batch, padded on the right, and their scores [n], by one model call."""
    ids, mask = right_padded([sequences[i] for i in batch], pad_token_id, device)
    return batch, model(input_ids=ids, attention_mask=mask).logits[:, 0]
