"""From pairs to the inputs of a micro-batch: one flat row, or several under a token budget."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import get_worker_info

from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.forward.pairs import PairRow, num_tokens_of_pair, pair_row


class PairCollator:
    """Makes `{"rows": [PairRow, ...]}` of pairs, or of rows of pairs that were planned already.

    Args:
        share_prompt: One copy of what both sides begin with.
        pad_token_id: The model's.
        max_tokens: Most tokens of a row; None for one row. A pair that is larger gets a row of its own.
        clock: Charged with the phase `layout`, in the main process.
        padded: A collator of pairs whose outputs stand beside `rows`, for a `compute_metrics` that asks for inputs.
    """

    def __init__(
        self,
        share_prompt: bool,
        pad_token_id: int | None,
        max_tokens: int | None,
        clock: PhaseClock,
        padded: Callable[[list[Any]], dict[str, Any]] | None = None,
    ):
        self.share_prompt = share_prompt
        self.pad_token_id = pad_token_id
        self.max_tokens = max_tokens
        self.clock = clock
        self.padded = padded

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        # A loader's worker process has no part in the trainer's clock, and must not touch the card.
        with nullcontext() if get_worker_info() else self.clock.phase("layout"):
            rows = self._rows(examples)
            batch: dict[str, Any] = {"rows": [self.row(row) for row in rows]}
            pairs = [pair for row in rows for pair in row]
            return batch | (self.padded(pairs) if self.padded and pairs else {})

    def row(self, examples: Sequence[Mapping[str, Any]]) -> PairRow:
        return pair_row(examples, self.share_prompt, self.pad_token_id)

    def _rows(self, examples: Sequence[Any]) -> Sequence[Sequence[Mapping[str, Any]]]:
        if not examples or not isinstance(examples[0], Mapping):
            return examples
        if self.max_tokens is None:
            return [examples]
        # In their order: an evaluation's predictions stand in that of the dataset.
        rows: list[list[Mapping[str, Any]]] = []
        room = 0
        for example in examples:
            tokens = num_tokens_of_pair(example, self.share_prompt)
            if tokens > room or not rows:
                rows.append([])
                room = self.max_tokens
            rows[-1].append(example)
            room -= tokens
        return rows
