"""Rows of a padded batch without padding, and the flat rows that hold them. Integers on the host.

Legend: B rows of the padded batch, P its prompt width, C its completion width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trl_ext.errors import DataError
from trl_ext.packing.families.images import BatchImages
from trl_ext.packing.plan import PlannedRow, Segment, plan_rows
from trl_ext.packing.ragged import Ragged, cumulated
from trl_ext.packing.step_plan import RowSize, num_tokens
from trl_ext.trainers.rows.images import GivenImages
from trl_ext.trainers.rows.sentence import named_with_verb


@dataclass(frozen=True, eq=False)
class Unpadded:
    """The real tokens of a padded prompt-completion batch."""

    sequences: Ragged  # for each row the prompt, then the completion
    num_scored: np.ndarray  # [B] tokens of the completion
    width: int  # C
    images: BatchImages | None = None  # the images that negative tokens name; None if the model takes none

    def with_images(self, given: GivenImages | None) -> "Unpadded":
        """Return the batch with its images; `given` is None if the model takes none."""
        if given is None:
            return self
        sequences, images = BatchImages.of(self.sequences, given.rows, given.reader, given.runs_everywhere)
        return replace(self, sequences=sequences, images=images)

    def take(self, rows: Sequence[int], width: int) -> "Unpadded":
        """Return some of the rows, as a batch of completion width `width`."""
        images = None if self.images is None else self.images.take(rows)
        return Unpadded(self.sequences.take(rows), self.num_scored[list(rows)], width, images)


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> Unpadded:
    """Remove the padding.

    Args:
        input_ids, attention_mask: [B, P + C] prompts padded on the left, completions on the right.
        width: C.

    Raises:
        DataError: A row has a completion and no prompt.
    """
    # One transfer from the device for the whole batch: planning works on integers.
    marked = input_ids.masked_fill(attention_mask == 0, -1).to(torch.int32).cpu().numpy()
    is_token = marked >= 0
    sequences = Ragged(marked[is_token].astype(np.int64), cumulated(is_token.sum(1)))
    num_scored = is_token[:, marked.shape[1] - width :].sum(1)
    if problem := rows_without_prompt(sequences.lengths - num_scored, num_scored):
        raise DataError(problem)
    return Unpadded(sequences, num_scored, width)


def rows_without_prompt(prompt_lengths: Sequence[int] | np.ndarray, num_scored: Sequence[int] | np.ndarray) -> str:
    """Return a sentence about rows whose first completion token has no token before it; "" if there are none."""
    rows = np.flatnonzero((np.asarray(prompt_lengths) == 0) & (np.asarray(num_scored) > 0)).tolist()
    if not rows:
        return ""
    return (
        f"In this batch {named_with_verb(rows)} no prompt token, and nothing predicts the first "
        "token of the completion. Drop such rows, or take a tokenizer that begins texts with a BOS token; a "
        "rollout_func returns at least one token of each row as prompt_ids."
    )


def plan(
    batch: Unpadded,
    share_prompt: bool,
    max_tokens: int | None = None,
    keep_all: bool = False,
    prefix_multiple: int | None = None,
) -> list[PlannedRow]:
    """Plan flat rows that hold every scored token of the batch.

    Rows without a scored token (completions masked because they were cut off) are left out: their log-probabilities
    are not needed.

    Args:
        batch: The rows.
        share_prompt: Whether rows with a common prompt share one copy of it.
        max_tokens, prefix_multiple: As in `plan_rows`.
        keep_all: Whether rows without a scored token stay, for models whose auxiliary loss counts every token.
    """
    kept = [i for i, scored in enumerate(batch.num_scored) if scored or keep_all]
    if not kept:
        return [filler(batch)]
    sizes = row_sizes(batch, share_prompt)
    in_common = [shareable(batch.sequences[i]) for i in kept] if share_prompt else None
    return renumbered(plan_rows([sizes[i] for i in kept], max_tokens, in_common, prefix_multiple), kept)


def plan_forwards(
    batch: Unpadded,
    share_prompt: bool,
    max_tokens: int | None,
    batch_size: int | None,
    keep_all: bool = False,
    prefix_multiple: int | None = None,
) -> list[PlannedRow]:
    """Plan one flat row of the batch if it is small enough; else several.

    Args:
        batch, share_prompt, keep_all: As in `plan`.
        max_tokens: Most tokens of a row; None: as many as `batch_size` rows packed together.
        batch_size: Rows of a padded forward; None for all at once.
        prefix_multiple: As in `plan_rows`.
    """
    if max_tokens is None:
        sizes, each = row_sizes(batch, share_prompt), batch_size or len(batch.sequences)
        max_tokens = max(num_tokens(sizes[start : start + each]) for start in range(0, len(sizes), each))
    rows = plan(batch, share_prompt, keep_all=keep_all)
    if rows[0].num_tokens > max_tokens:
        rows = plan(batch, share_prompt, max_tokens, keep_all, prefix_multiple)
    return rows


def shareable(tokens: np.ndarray) -> np.ndarray:
    """Return a number for each token of a scored row but the last; rows may share tokens with equal numbers.

    Numbers are equal where the token and the next token are equal: a shared token then predicts the same token in all
    rows. The last token of a common prefix predicts different tokens, so each row keeps its own copy. For a token of
    an image, the next token is the first token after the image, so that images are shared whole.
    """
    after = tokens[1:]
    if (tokens < 0).any():
        ends = np.flatnonzero(np.diff(tokens, append=tokens[-1] + 1))
        after = tokens[np.minimum(ends[np.searchsorted(ends, np.arange(len(after)))] + 1, len(tokens) - 1)]
        after = np.where(tokens[:-1] < 0, after, tokens[1:])
    return (tokens[:-1] << 32) + after


def row_sizes(batch: Unpadded, share_prompt: bool) -> list[RowSize]:
    """Return for each row how many tokens it shares and how many it has alone, for the plan of several forwards."""
    groups: dict[bytes, int] = {}
    sizes = []
    for i, scored in enumerate(batch.num_scored):
        tokens = batch.sequences[i]
        prompt = tokens[: len(tokens) - scored]
        # The last prompt token stays with each completion: it predicts the first completion token.
        shared = whole_images(tokens, max(len(prompt) - 1, 0)) if share_prompt else 0
        group = groups.setdefault(prompt.tobytes(), len(groups)) if share_prompt else i
        sizes.append(RowSize(group, shared, len(tokens) - shared))
    return sizes


def whole_images(tokens: np.ndarray, num: int) -> int:
    """Return the largest length of at most `num` tokens at which the sequence can be cut without cutting an image."""
    while 0 < num < len(tokens) and tokens[num] < 0 and tokens[num - 1] == tokens[num]:
        num -= 1
    return num


def renumbered(rows: Sequence[PlannedRow], numbers: Sequence[int]) -> list[PlannedRow]:
    """Return the rows with item i renamed to `numbers[i]`."""
    found = []
    for row in rows:
        segments = tuple(replace(segment, item=numbers[segment.item]) for segment in row.segments)
        found.append(replace(row, segments=segments))
    return found


def filler(batch: Unpadded) -> PlannedRow:
    """Return the shortest forward with a prediction: two tokens of the longest sequence, not scored."""
    longest = int(batch.sequences.lengths.argmax())
    length = min(2, len(batch.sequences[longest]))
    return PlannedRow((Segment(0, length, longest, 0, None, is_prefix=True),))
