"""Tokens of an optimizer step, over all ranks: what went through the model, and what would have without packing."""

from typing import Any

import torch


class TokenCounts:
    """Adds up tokens on this rank; `take` adds the ranks.

    forwarded: through the model. raw: without padding and without sharing. padded: as padded batches.
    """

    def __init__(self) -> None:
        self._counts = [0, 0, 0]

    def add(self, forwarded: int, raw: int, padded: int) -> None:
        for i, count in enumerate((forwarded, raw, padded)):
            self._counts[i] += count

    def take(self, accelerator: Any) -> dict[str, float]:
        """Return the metrics since the last call, over all ranks, and start over. Collective."""
        # Integers: float32 would round, and not every device has float64.
        local = torch.tensor(self._counts, dtype=torch.int64, device=accelerator.device)
        forwarded, raw, padded = map(float, accelerator.reduce(local, reduction="sum").tolist())
        self._counts = [0, 0, 0]
        if not forwarded:  # everything came by a way that is not counted
            return {}
        return {
            # Without rows but the one that counts for nothing there is no saving.
            **({"packing/forwarded_over_raw": forwarded / raw} if raw else {}),
            **({"packing/padded_over_forwarded": padded / forwarded} if padded else {}),
            "packing/forwarded_tokens": forwarded,
            "packing/padded_tokens": padded,
        }
