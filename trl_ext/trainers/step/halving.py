"""When a forward runs out of memory, all ranks agree, and run it again in halves, with the same gradients."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from transformers.utils import logging

from trl_ext.compat.swap import swapped
from trl_ext.errors import OutOfMemoryError
from trl_ext.trainers.step.forward import Forward
from trl_ext.trainers.step.out_of_memory import is_out_of_memory
from trl_ext.trainers.step.sequence_parallel import size_of_groups
from trl_ext.trainers.step.trainer import RunningTrainer

logger = logging.get_logger(__name__)
# With these, a forward has no collective inside the bare model.
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_MUSA")


class SplitNeeded(Exception):
    """Raised on all ranks if a forward failed on some rank; all run it again in halves."""


class ForwardEnding(NamedTuple):
    """How a forward went on all ranks."""

    failed: bool  # some rank ran out of memory
    is_stuck: bool  # a rank that failed cannot cut its forward


class Agreement:
    """Informs all ranks if one of them ran out of memory."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._flags: torch.Tensor | None = None

    def exchange(self, failed: bool, is_stuck: bool) -> ForwardEnding:
        """Return how a forward went on all ranks, from how it went on this rank. Collective."""
        assert self._flags is not None
        # 1 means success: the tests' memory twin runs this on fake tensors, whose values are all 1.
        self._flags.copy_(torch.tensor([not failed, not (failed and is_stuck)], dtype=torch.int32))
        torch.distributed.all_reduce(self._flags, op=torch.distributed.ReduceOp.MIN)
        all_fine, all_can_cut = self._flags.tolist()
        return ForwardEnding(failed=not all_fine, is_stuck=not all_can_cut)

    @contextmanager
    def over(self, model: Any, is_stuck: bool) -> Iterator[None]:
        """Make every forward with gradient inside the block end in the same way on all ranks.

        Args:
            model: As training calls it, wrapped.
            is_stuck: True if this rank's forward cannot be cut.

        Raises:
            SplitNeeded: Some ranks failed, and all of them can cut.
            OutOfMemoryError: Another rank failed and cannot cut; that rank raises the allocator's error itself.
        """
        if self._flags is None:  # allocated while there is memory
            self._flags = torch.zeros(2, dtype=torch.int32, device=self._accelerator.device)
        bare = getattr(model, "module", model)
        plain = bare.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            try:
                output = plain(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self.exchange(failed=True, is_stuck=is_stuck).is_stuck:
                    raise
            else:
                outcome = self.exchange(failed=False, is_stuck=is_stuck)
                if not outcome.failed:
                    return output
                if outcome.is_stuck:
                    raise OutOfMemoryError.of_another_rank()
            # After the except block no variable holds the error, whose traceback holds the activations.
            raise SplitNeeded

        with swapped(bare, forward=forward):
            yield


def why_ranks_cannot_agree(accelerator: Any, size_of_groups: int = 1) -> str:
    """Return why a forward that fails on one rank fails on all; "" if ranks can agree.

    `size_of_groups`: processes that share each row.
    """
    if size_of_groups > 1:
        return "under sequence_parallel the others of its group wait for this one's tokens inside the forward"
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return "" if stage < 3 else "under ZeRO-3 the other ranks wait for this one's weights inside the forward"
    parallel = getattr(accelerator, "parallelism_config", None)
    if kind.value not in _PLAIN or (getattr(parallel, "tp_size", 1) or 1) > 1:
        return "the model is spread over the ranks, which wait for this one inside the forward"
    return ""


class Halving:
    """Halves the forwards of a trainer with `step_settings` if they do not fit, and stores how often.

    `why_whole`: why its forwards cannot be cut, or "". Attributes: `why_not`, why forwards are not halved, or ""; and
    `level`, how often those of each role were halved.
    """

    def __init__(self, trainer: RunningTrainer, why_whole: str):
        self._trainer = trainer
        self.level: dict[str, int] = defaultdict(int)
        self._has_warned = False
        splits = getattr(trainer.args, "memory_on_oom", "split") == "split"
        lost = why_ranks_cannot_agree(trainer.accelerator, size_of_groups(trainer.args))
        self.why_not = (lost or why_whole) if splits else "memory_on_oom is 'raise'"

    def cut(self, role: str, forwards: Sequence[Forward]) -> list[Forward]:
        """Return the forwards, halved as often as the role's forwards have been."""
        if self.why_not:
            return list(forwards)
        cut: list[Forward] = []
        for forward in forwards:
            parts: list[Forward] = [forward]
            for _ in range(self.level[role] - forward.level):
                parts = [half for part in parts for half in part.halves()]
            cut += parts
        return cut

    def warn(self, role: str, failed: Forward) -> None:
        """Warn once about a forward that did not fit, with a setting that makes forwards smaller."""
        if self._has_warned or not self._trainer.accelerator.is_main_process:
            return
        self._has_warned = True
        level = self.level[role]
        advice = _smaller_forwards(self._trainer, level)
        hint = f" Set {advice} for the next run." if advice else ""
        logger.warning(
            f"Out of memory in a forward of {failed.num_rows} rows, {failed.num_tokens:,} tokens; from here forwards "
            f"are {2**level} times smaller, with the same gradients.{hint}"
        )


def _smaller_forwards(trainer: RunningTrainer, level: int) -> str:
    """Return settings for the same optimization with forwards `2**level` times smaller; "" if there are none."""
    args, settings = trainer.args, trainer.step_settings
    if settings.max_tokens is not None:
        return f"max_tokens_per_forward={settings.max_tokens // 2**level}"
    if settings.why_rows_stay:
        return ""
    size = -(-args.per_device_train_batch_size // 2**level)
    steps = args.gradient_accumulation_steps * (args.per_device_train_batch_size // size)
    return f"per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
