"""The size of forwards: halved, with the same gradients, each time memory runs out."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from trl_ext.trainers.step.agreement import why_ranks_cannot_agree
from trl_ext.trainers.step.forward import Forward
from trl_ext.trainers.step.sequence_parallel import size_of_groups

logger = logging.get_logger(__name__)


class Halving:
    """Halves the forwards of a trainer with `step_settings` if they do not fit, and stores how often.

    `why_whole`: why its forwards cannot be cut, or "". Attribute `why_not`: why forwards are not halved, or "".
    """

    def __init__(self, trainer: Any, why_whole: str):
        self._trainer = trainer
        self._level: dict[str, int] = defaultdict(int)
        self._has_warned = False
        splits = getattr(trainer.args, "memory_on_oom", "split") == "split"
        lost = why_ranks_cannot_agree(trainer.accelerator, size_of_groups(trainer.args))
        self.why_not = (lost or why_whole) if splits else "memory_on_oom is 'raise'"

    def level(self, role: str) -> int:
        """Return how often the forwards of a role were halved."""
        return self._level[role]

    def halve(self, role: str) -> None:
        """Halve the forwards of a role from now on."""
        self._level[role] += 1

    def cut(self, role: str, forwards: Sequence[Forward]) -> list[Forward]:
        """Return the forwards, halved as often as the role's forwards have been."""
        if self.why_not:
            return list(forwards)
        cut: list[Forward] = []
        for forward in forwards:
            parts: list[Forward] = [forward]
            for _ in range(self._level[role] - forward.level):
                parts = [half for part in parts for half in part.halves()]
            cut += parts
        return cut

    def warn(self, role: str, failed: Forward) -> None:
        """Warn once about a forward that did not fit, with a setting that makes forwards smaller."""
        if self._has_warned or not self._trainer.accelerator.is_main_process:
            return
        self._has_warned = True
        level = self._level[role]
        advice = _smaller_forwards(self._trainer, level)
        hint = f" Set {advice} for the next run." if advice else ""
        logger.warning(
            f"Out of memory in a forward of {failed.num_rows} rows, {failed.num_tokens:,} tokens; from here forwards "
            f"are {2**level} times smaller, with the same gradients.{hint}"
        )


def _smaller_forwards(trainer: Any, level: int) -> str:
    """Return settings for the same optimization with forwards `2**level` times smaller; "" if there are none."""
    args, settings = trainer.args, trainer.step_settings
    if settings.max_tokens is not None:
        return f"max_tokens_per_forward={settings.max_tokens // 2**level}"
    if settings.why_rows_stay:
        return ""
    size = -(-args.per_device_train_batch_size // 2**level)
    steps = args.gradient_accumulation_steps * (args.per_device_train_batch_size // size)
    return f"per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
