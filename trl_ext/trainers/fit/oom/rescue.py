"""Mixed into the trainers: a step's forwards one by one, each with its backward, so that one is alive at a time.

A forward that runs out of memory is taken again in halves, with the same gradients, and the run keeps the smaller
size. Before the first failure that costs nothing with one process, with several two small integers a forward.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer
from transformers.utils import logging

from trl_ext.compat.swap import swapped
from trl_ext.errors import OutOfMemoryError
from trl_ext.trainers.fit.oom.errors import is_out_of_memory
from trl_ext.trainers.forward.gradient_sync import gradients_unsynced
from trl_ext.trainers.forward.sequence_parallel import size_of_groups

logger = logging.get_logger(__name__)


# A forward under these has no collective inside the bare model.
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_MUSA")


class SplitNeeded(Exception):
    """A forward failed on some rank; all of them take it again in halves."""


class Agreement:
    """Lets all ranks know that one of them ran out of memory.

    Args:
        accelerator: accelerate's.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._flags: torch.Tensor | None = None

    def exchange(self, failed: bool, is_stuck: bool) -> tuple[bool, bool]:
        """True if any rank failed, and True if one of these cannot cut its forward. Collective."""
        assert self._flags is not None
        # 1 is good news: `trl-ext dryrun` runs this on fake tensors, whose values are all 1.
        self._flags.copy_(torch.tensor([not failed, not (failed and is_stuck)], dtype=torch.int32))
        torch.distributed.all_reduce(self._flags, op=torch.distributed.ReduceOp.MIN)
        all_fine, all_can_cut = self._flags.tolist()
        return not all_fine, not all_can_cut

    @contextmanager
    def over(self, model: Any, is_stuck: bool) -> Iterator[None]:
        """Make every forward with gradient inside the block end alike on all ranks.

        Args:
            model: As training calls it, wrapped.
            is_stuck: True if this rank's forward cannot be cut.

        Raises:
            SplitNeeded: A rank failed, and those that did can cut.
            OutOfMemoryError: Another rank failed and cannot cut; it raises the allocator's error itself.
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
                if not is_out_of_memory(error) or self.exchange(failed=True, is_stuck=is_stuck)[1]:
                    raise
            else:
                failed, stuck = self.exchange(failed=False, is_stuck=is_stuck)
                if not failed:
                    return output
                if stuck:
                    raise OutOfMemoryError.of_another_rank()
            # Out here no variable holds the error, whose traceback holds the activations.
            raise SplitNeeded

        with swapped(bare, forward=forward):
            yield


def why_ranks_cannot_agree(accelerator: Any, size_of_groups: int = 1) -> str:
    """Return a reason why a forward that fails on one rank is lost on all; "" if it is not.

    Args:
        accelerator: accelerate's.
        size_of_groups: Processes that share each row.
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


class Forward(Protocol):
    """What goes through a model at once, and backward at once."""

    @property
    def level(self) -> int:
        """How often it was halved, or its budget."""

    @property
    def most_rows(self) -> int:
        """At least the rows of any rank's forward at this place; equal on all ranks."""

    @property
    def num_rows(self) -> int:
        """Rows, or pairs, on this rank; may be 0."""

    @property
    def num_tokens(self) -> int:
        """Real tokens on this rank."""

    def halves(self) -> Sequence[Self]:
        """Two smaller forwards, or only itself where no rank can cut; equally many on every rank."""

    def batch(self) -> Any:
        """Inputs of the loss."""


class Rescue:
    """Runs forwards, halves those that do not fit, and remembers how often.

    Args:
        trainer: A trainer with `counts` and `step_settings`.
        why_whole: Why its forwards cannot be cut; "" if they can.

    Attributes:
        running: The forward that runs, or ran last; None before the first.
        has_forwards: False in a micro-step from which all rows were left out.
    """

    def __init__(self, trainer: Any, why_whole: str):
        self._trainer = trainer
        self._agreement = Agreement(trainer.accelerator)
        self._level: dict[str, int] = defaultdict(int)
        self._has_warned = False
        splits = getattr(trainer.args, "memory_on_oom", "split") == "split"
        lost = why_ranks_cannot_agree(trainer.accelerator, size_of_groups(trainer.args))
        self.why_not = (lost or why_whole) if splits else "memory_on_oom is 'raise'"
        self.running: Forward | None = None
        self.has_forwards = True

    @property
    def level(self) -> int:
        """How often the actor's forwards were halved."""
        return self._level["actor"]

    def run(self, role: str, forwards: Sequence[Forward], attempt: Callable[[Any, bool], None]) -> None:
        """Attempt each forward, in the size in which its kind runs by now, or smaller ones.

        Args:
            role: Whose forwards; the critic's may need to be smaller than the actor's.
            forwards: In their order.
            attempt: Called with a forward and whether it is the last; the model is called through `forward`, and after
                it comes the backward.
        """
        self.has_forwards = bool(forwards)
        failed: Forward | None = None
        waiting = self._cut(role, forwards)
        while waiting:
            before = self._trainer.counts.mark()
            self.running = waiting[0]
            try:
                attempt(waiting[0], len(waiting) == 1)
            except SplitNeeded:
                failed = failed or waiting[0]
            else:
                waiting.pop(0)
                continue
            # Here, where the exception and with it the failed graph is gone.
            self._trainer.counts.roll_back(before)
            clear_device_cache(garbage_collection=True)  # graphs in reference cycles included
            self._level[role] += 1
            waiting = self._cut(role, waiting)
        if failed is not None:
            self._warn(role, failed)

    def _cut(self, role: str, forwards: Sequence[Forward]) -> list[Forward]:
        """The forwards, halved as often as this kind has been."""
        if self.why_not:
            return list(forwards)
        cut: list[Forward] = []
        for forward in forwards:
            parts: list[Forward] = [forward]
            for _ in range(self._level[role] - forward.level):
                parts = [half for part in parts for half in part.halves()]
            cut += parts
        return cut

    def forward(self, model: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `compute` and return what it returns.

        Args:
            model: What it calls, as training calls it.
            compute: The model's call and the loss of the running forward.

        Raises:
            SplitNeeded: Memory ran out on some rank, and it can cut its forward.
        """
        assert self.running is not None
        if self.why_not or self.running.most_rows < 2:
            return compute()
        is_stuck = self.running.num_rows < 2
        if self._trainer.accelerator.num_processes > 1:
            with self._agreement.over(model, is_stuck):
                return compute()
        try:
            return compute()
        except RuntimeError as error:
            if is_stuck or not is_out_of_memory(error):
                raise
        raise SplitNeeded

    def _warn(self, role: str, failed: Forward) -> None:
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


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What the plain Trainer's step asks while it takes one forward backward, within the trainer's own step.

    Args:
        loss_of: From a forward's batch to its loss.
    """

    loss_of: Callable[[Any], torch.Tensor]

    def prepared(self, batch: Any) -> Any:
        """Stands for `Trainer._prepare_inputs`: a forward's batch is on the device already."""
        return batch

    def loss(self, model: Any, batch: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Stands for `Trainer.compute_loss`: of this forward, not of all that are in the micro-step."""
        return self.loss_of(batch)


class OutOfMemoryRescue(Trainer):
    """Mixed into a trainer, which plans the forwards of a step and sends its loss through `_one_by_one`."""

    @property
    def _why_whole(self) -> str:
        """Why micro-batches are not cut; "" if they are."""
        return ""

    @cached_property
    def rescue(self) -> Rescue:
        """What runs the forwards, and remembers how often they were halved."""
        return Rescue(self, self._why_whole)

    def _one_by_one(
        self,
        compute: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        forwards: Sequence[Forward],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of these forwards, with the gradient of the last; all others went backward.

        Args:
            compute: Loss of a forward's batch, as in `compute_loss`.
            model: As training calls it.
            forwards: Equally many on every rank. None: the loss is 0, without gradient.
            num_items_in_batch: The Trainer's.
        """
        rescue = self.rescue
        losses: list[torch.Tensor] = []

        def loss_of(batch: Any) -> torch.Tensor:
            losses.append(rescue.forward(model, lambda: compute(model, batch, False, num_items_in_batch)))
            return losses[-1]

        inner = InnerStep(loss_of)

        def attempt(forward: Forward, is_last: bool) -> None:
            if is_last:
                loss_of(forward.batch())
                return
            asked = swapped(self, _prepare_inputs=inner.prepared, compute_loss=inner.loss)
            with gradients_unsynced(self.accelerator, model), asked:
                # The plain Trainer's step: loss, scaling and backward, without generation and step counters.
                Trainer.training_step(self, model, forward.batch(), num_items_in_batch)
            losses[-1] = losses[-1].detach()

        rescue.run("actor", forwards, attempt)
        if not losses:
            return torch.zeros((), device=self.accelerator.device)
        return sum(losses[:-1], start=losses[-1])


def _smaller_forwards(trainer: Any, level: int) -> str:
    """Return settings with the same optimisation whose forwards are `2**level` times smaller; "" if there are none."""
    args, settings = trainer.args, trainer.step_settings
    if settings.max_tokens is not None:
        return f"max_tokens_per_forward={settings.max_tokens // 2**level}"
    if settings.why_rows_stay:
        return ""
    size = -(-args.per_device_train_batch_size // 2**level)
    steps = args.gradient_accumulation_steps * (args.per_device_train_batch_size // size)
    return f"per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
