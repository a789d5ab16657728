"""The loop over the forwards of an optimizer step; each has its own backward, so that one graph is alive at a time.

A forward that runs out of memory is run again in halves, with the same gradients, and the run keeps the smaller size.
Until the first failure this costs nothing with one process, and two small integers per forward with several.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer

from trl_ext.compat.swap import swapped
from trl_ext.trainers.forward.gradient_sync import gradients_unsynced
from trl_ext.trainers.step.forward import Forward, running
from trl_ext.trainers.step.halving import Agreement, Halving, SplitNeeded
from trl_ext.trainers.step.out_of_memory import is_out_of_memory
from trl_ext.trainers.step.trainer import RunningTrainer


class ForwardLoop:
    """Runs forwards, as large as memory allows.

    Args:
        trainer: A trainer with `counts` and `step_settings`.
        why_whole: Why its forwards cannot be cut; "" if they can.

    Attributes:
        last: The running or last forward, for messages; None before the first.
        has_forwards: False in a micro-step from which all rows were left out.
        halving: How often forwards were halved.
    """

    def __init__(self, trainer: RunningTrainer, why_whole: str):
        self._trainer = trainer
        self._agreement = Agreement(trainer.accelerator)
        self.halving = Halving(trainer, why_whole)
        self.last: Forward | None = None
        self.has_forwards = True

    def run(self, role: str, forwards: Sequence[Forward], attempt: Callable[[Any, bool], None]) -> None:
        """Call `attempt` with each forward, halved as often as needed, and whether it is the last.

        `attempt` calls the model through `forward`, then runs the backward. `role` is the model's role: the critic may
        need smaller forwards than the actor.
        """
        self.has_forwards = bool(forwards)
        failed: Forward | None = None
        waiting = self.halving.cut(role, forwards)
        while waiting:
            before = self._trainer.counts.mark()
            self.last = waiting[0]
            try:
                with running(waiting[0]):
                    attempt(waiting[0], len(waiting) == 1)
            except SplitNeeded:
                failed = failed or waiting[0]
            else:
                waiting.pop(0)
                continue
            # At this point the exception, which holds the failed graph, is gone.
            self._trainer.counts.roll_back(before)
            clear_device_cache(garbage_collection=True)  # graphs in reference cycles included
            self.halving.level[role] += 1
            waiting = self.halving.cut(role, waiting)
        if failed is not None:
            self.halving.warn(role, failed)

    def forward(self, model: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `compute`, the model's call and the loss of the running forward, and return its result.

        `model` is the model as training calls it.

        Raises:
            SplitNeeded: Memory ran out on some rank, and it can cut its forward.
        """
        assert self.last is not None
        if self.halving.why_not or self.last.most_rows < 2:
            return compute()
        is_stuck = self.last.num_rows < 2
        if self._trainer.accelerator.num_processes > 1:
            with self._agreement.over(model, is_stuck):
                return compute()
        try:
            return compute()
        except RuntimeError as error:
            if is_stuck or not is_out_of_memory(error):
                raise
        raise SplitNeeded


class RunsForwards(Trainer):
    """A mixin for trainers that plan the forwards of a step and compute their loss through `_one_by_one`."""

    @property
    def _why_whole(self) -> str:
        """Why micro-batches cannot be cut; "" if they can."""
        return ""

    @cached_property
    def forward_loop(self) -> ForwardLoop:
        """The loop that runs the forwards and stores how often they were halved."""
        return ForwardLoop(cast(RunningTrainer, self), self._why_whole)  # with PackingSwitch it is one

    def _one_by_one(
        self,
        compute: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        forwards: Sequence[Forward],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the sum of the forwards' losses; only the last still has a graph, as the others ran their backward.

        Args:
            compute: Returns the loss of a forward's batch, as `compute_loss` does.
            model: As training calls it.
            forwards: Of this rank; equally many on every rank. Without any the loss is 0, without a gradient.
            num_items_in_batch: As in transformers.
        """
        loop = self.forward_loop
        losses: list[torch.Tensor] = []

        def loss_of(batch: Any) -> torch.Tensor:
            return loop.forward(model, lambda: compute(model, batch, False, num_items_in_batch))

        def attempt(forward: Forward, is_last: bool) -> None:
            if is_last:
                losses.append(forward.loss(loss_of))
                return

            def kept_loss() -> torch.Tensor:
                losses.append(forward.loss(loss_of))
                return losses[-1]

            # A forward's batch is on the device already, and its loss is not that of the whole micro-step.
            asked = swapped(self, _prepare_inputs=lambda batch: batch, compute_loss=lambda *_, **__: kept_loss())
            with gradients_unsynced(self.accelerator, model), asked:
                # Plain Trainer's step: loss, scaling and backward, without generation and step counters.
                Trainer.training_step(self, model, {}, num_items_in_batch)
            losses[-1] = losses[-1].detach()

        loop.run("actor", forwards, attempt)
        if not losses:
            return torch.zeros((), device=self.accelerator.device)
        return sum(losses[:-1], start=losses[-1])
