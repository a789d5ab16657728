"""Settings that the forwards of an optimizer step are planned by, and the numbers that they record."""

from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.packing.families.images import ImageReader
from trl_ext.packing.ulysses import SequenceGroup

# The loss of a micro-batch is a mean over its rows, or a sum over its tokens divided by its rows; ...
MEAN_OVER_ROWS = frozenset({"grpo", "sapo", "luspo", "dr_grpo"})
# ... a sum over its tokens divided by a constant of the optimizer step; ...
SUM_OVER_TOKENS = frozenset({"dapo", "cispo", "vespo"})
# ... or a mean over its tokens, where the split into micro-batches is part of the loss.
MEAN_OVER_TOKENS = frozenset({"bnpo"})


def why_micro_batch_stays_whole(args: Any, *, takes_images: bool, has_entropy_bonus: bool, has_aux_loss: bool) -> str:
    """Return why the loss of a GRPO micro-batch is not a weighted sum over its rows; "" if it is.

    Args:
        args: The run's config.
        takes_images: Whether rows have images that are padded.
        has_entropy_bonus: Whether the loss rewards entropy.
        has_aux_loss: Whether the load-balancing loss of a mixture of experts is added.
    """
    known, quantile = MEAN_OVER_ROWS | SUM_OVER_TOKENS | MEAN_OVER_TOKENS, args.top_entropy_quantile
    reasons = {
        f"loss_type='{args.loss_type}' is not known to be a sum over rows": args.loss_type not in known,
        "rows may hold images, which padded batches do not count by rows": takes_images,
        f"top_entropy_quantile={quantile} is a quantile over all tokens of the micro-batch": quantile < 1.0,
        "the entropy bonus is a mean over all tokens of the micro-batch": has_entropy_bonus,
        "the load-balancing loss counts all tokens of the micro-batch together": has_aux_loss,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def why_rows_stay(args: Any, why_whole: str) -> str:
    """Return why a row has to be forwarded in its micro-batch, whatever the model; "" if it need not.

    `why_whole`: why a micro-batch cannot be cut, or "".
    """
    if why_whole or args.loss_type not in MEAN_OVER_TOKENS:
        return why_whole
    return f"loss_type='{args.loss_type}' is a mean over the tokens of each micro-batch"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The trainer's present settings of its forwards.

    Args:
        packs: Whether forwards are flat rows.
        share_prompt: Whether rows with a common prompt share one copy of it.
        max_tokens: Token budget of a forward; None without a budget.
        group: The processes that share rows with this process; None if each forwards its own rows.
        why_whole: Why a micro-batch cannot be cut; "" if it can.
        why_rows_stay: Why a row has to be forwarded in its micro-batch, whatever the model; "" if it need not.
        skips: Whether rows of zero advantage leave the update.
        num_passes: Forwards of the update with one backward each: 2 if a critic has its own forward.
        reader: Reads the images of rows for the model; None if rows have no images or are padded.
        caches_prefixes: Whether a prefix may be forwarded once for several forwards.
    """

    packs: bool
    share_prompt: bool
    max_tokens: int | None
    group: SequenceGroup | None
    why_whole: str = ""
    why_rows_stay: str = ""
    skips: bool = False
    num_passes: int = 1
    reader: ImageReader | None = None
    caches_prefixes: bool = False

    @property
    def rows_move(self) -> bool:
        """Whether a row may go to any forward of its optimizer step, on any rank."""
        return self.packs and not self.why_rows_stay


class StepCounts:
    """Numbers of the running optimizer step on this rank: tokens, and samples that forwards record for the metrics.

    Tokens are counted three times: forwarded (through the model), raw (without padding, without sharing) and padded
    (as padded batches).
    """

    def __init__(self) -> None:
        self._tokens = (0, 0, 0)
        self.samples: list[Any] = []

    def add(self, forwarded: int, raw: int, padded: int) -> None:
        """Add tokens of a forward."""
        before = self._tokens
        self._tokens = before[0] + forwarded, before[1] + raw, before[2] + padded

    def add_forward(self, num_forwarded: int, attention_mask: torch.Tensor, *, of_update: bool) -> None:
        """Add a forward of a padded batch; for the update, the plan has counted the raw and padded tokens."""
        if of_update:
            self.add(num_forwarded, 0, 0)
        else:
            self.add(num_forwarded, int(attention_mask.sum().item()), attention_mask.numel())

    def mark(self) -> Any:
        """Return the present state for `roll_back`."""
        return self._tokens, len(self.samples)

    def roll_back(self, mark: Any) -> None:
        """Remove everything recorded since the mark: a forward that failed is run again in halves."""
        self._tokens, num_samples = mark
        del self.samples[num_samples:]

    def take_tokens(self, accelerator: Any) -> dict[str, float]:
        """Return the token metrics since the last call, over all ranks, and start over. Collective."""
        # Integers: float32 would round, and not every device has float64.
        local = torch.tensor(self._tokens, dtype=torch.int64, device=accelerator.device)
        forwarded, raw, padded = map(float, accelerator.reduce(local, reduction="sum").tolist())
        self._tokens = (0, 0, 0)
        if not forwarded:  # no forward was counted
            return {}
        return {
            # If only a filler row was forwarded, there is no saving.
            **({"packing/forwarded_over_raw": forwarded / raw} if raw else {}),
            **({"packing/padded_over_forwarded": padded / forwarded} if padded else {}),
            "packing/forwarded_tokens": forwarded,
            "packing/padded_tokens": padded,
        }
