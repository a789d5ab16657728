"""The chunks of a micro-batch: its halves, and the share of its loss that each of them has.

Shares are such that the chunks' losses, each times its share, add up to the loss of the whole, and so do the
gradients. Legend: B rows, N pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trl_ext.trainers.forward.group_order import MEAN_OVER_ROWS, MEAN_OVER_TOKENS, SUM_OVER_TOKENS
from trl_ext.trainers.forward.pairs import PairRow


class Chunks(Protocol):
    """Cuts one kind of micro-batch."""

    def num_rows(self, batch: Any) -> int:
        """Rows, or pairs, on this rank."""

    def num_tokens(self, batch: Any) -> int:
        """Real tokens on this rank."""

    def halves(self, batch: Any) -> list[Any]:
        """Two smaller batches, or the batch itself; equally many on every rank."""

    def share(self, chunk: Any, whole: Any) -> Any:
        """The factor on the chunk's loss with which the chunks' losses add up to that of the whole."""

    def is_smallest_everywhere(self, batch: Any) -> bool:
        """True if no rank can cut this any further, as every rank knows without asking."""

    def advice(self, num_chunks: int) -> str:
        """Settings with which the chunks would be the micro-batches; empty if there are none."""


def cut(chunks: Chunks, batch: Any, halvings: int) -> list[Any]:
    """The batch halved so many times, as far as its rows go."""
    parts = [batch]
    for _ in range(halvings):
        parts = [half for part in parts for half in chunks.halves(part)]
    return parts


# Completions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionChunks:
    """Cuts micro-batches of GRPO and PPO: dicts of tensors and lists with one entry a row.

    Args:
        args: The trainer's.
    """

    args: Any

    def num_rows(self, batch: dict[str, Any]) -> int:
        return len(batch["completion_ids"])

    def num_tokens(self, batch: dict[str, Any]) -> int:
        # On the host: there may be no memory left on the card for a sum.
        return int(batch["prompt_mask"].cpu().sum() + batch["completion_mask"].cpu().sum())

    def halves(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        rows = self.num_rows(batch)
        if rows < 2:
            return [batch]
        middle = (rows + 1) // 2
        return [_part(batch, slice(0, middle)), _part(batch, slice(middle, rows))]

    def share(self, chunk: dict[str, Any], whole: dict[str, Any]) -> Any:
        if self.args.loss_type in SUM_OVER_TOKENS:
            return 1.0
        if self.args.loss_type in MEAN_OVER_TOKENS:
            return _counted(chunk) / _counted(whole)
        return self.num_rows(chunk) / self.num_rows(whole)

    def is_smallest_everywhere(self, batch: dict[str, Any]) -> bool:
        return self.num_rows(batch) < 2  # every rank has as many

    def advice(self, num_chunks: int) -> str:
        if self.args.loss_type in MEAN_OVER_TOKENS:
            return ""  # fewer rows in a micro-batch are another loss
        return _smaller_micro_batch(self.args, num_chunks)


def _part(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    def of(value: Any) -> Any:
        is_scalar = isinstance(value, torch.Tensor) and value.ndim == 0
        return value[rows] if isinstance(value, torch.Tensor | list | tuple) and not is_scalar else value

    return {name: of(value) for name, value in batch.items()}


def _counted(batch: dict[str, Any]) -> torch.Tensor:
    """TRL's divisor of a mean over tokens."""
    return (batch["completion_mask"] * batch.get("tool_mask", 1)).sum().clamp(min=1.0)


def why_completions_stay_whole(trainer: Any) -> str:
    """A reason why the loss of a GRPO trainer's micro-batch is no sum over its rows; "" if it is one."""
    args = trainer.args
    if args.loss_type not in MEAN_OVER_ROWS | SUM_OVER_TOKENS | MEAN_OVER_TOKENS:
        return f"loss_type='{args.loss_type}' is not known to be a sum over rows"
    if trainer._takes_images:
        return "rows may hold images, which are not counted by rows"
    if args.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={args.top_entropy_quantile} is a quantile over all tokens of the micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over all tokens of the micro-batch"
    if trainer.aux_loss_enabled:
        return "the load-balancing loss counts all tokens of the micro-batch together"
    return ""


# Pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairChunks:
    """Cuts micro-batches of the reward trainer: `{"rows": [PairRow]}`.

    Args:
        args: The trainer's.
        make_row: Makes a row of pairs; of no pairs, one that counts for nothing.
        fills: True if ranks may hold different numbers of pairs, so that a part without pairs is a row of its own.
        is_mean: True if the loss is a mean over the pairs of the micro-batch, False if it is a sum divided by the
            pairs of the optimizer step.
    """

    args: Any
    make_row: Callable[[Sequence[Any]], PairRow]
    fills: bool
    is_mean: bool

    def num_rows(self, batch: dict[str, Any]) -> int:
        return len(_pairs(batch))

    def num_tokens(self, batch: dict[str, Any]) -> int:
        return sum(row.flat.num_tokens for row in batch["rows"])

    def halves(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        pairs = _pairs(batch)
        middle = (len(pairs) + 1) // 2
        parts = [part for part in (pairs[:middle], pairs[middle:]) if part or self.fills]
        return [{**batch, "rows": [self.make_row(part)]} for part in parts] or [batch]

    def share(self, chunk: dict[str, Any], whole: dict[str, Any]) -> float:
        return self.num_rows(chunk) / self.num_rows(whole) if self.is_mean else 1.0

    def is_smallest_everywhere(self, batch: dict[str, Any]) -> bool:
        return not self.fills and self.num_rows(batch) < 2

    def advice(self, num_chunks: int) -> str:
        budget = getattr(self.args, "max_tokens_per_forward", None)
        if budget is None:
            return _smaller_micro_batch(self.args, num_chunks)
        return f"max_tokens_per_forward={budget // num_chunks}"


def _pairs(batch: dict[str, Any]) -> list[Any]:
    return [pair for row in batch["rows"] for pair in row.examples]


def _smaller_micro_batch(args: Any, num_chunks: int) -> str:
    size = -(-args.per_device_train_batch_size // num_chunks)
    steps = args.gradient_accumulation_steps * (args.per_device_train_batch_size // size)
    return f"per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
