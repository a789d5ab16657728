"""The loop of an optimizer step: forwards one by one, each with its backward, so that one is alive at a time.

A forward that runs out of memory is taken again in halves, with the same gradients, and the run keeps the smaller
size. Before the first failure that costs nothing with one process, with several two small integers a forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer

from trl_ext.compat.swap import swapped
from trl_ext.trainers.forward.gradient_sync import gradients_unsynced
from trl_ext.trainers.step.agreement import Agreement, SplitNeeded
from trl_ext.trainers.step.forward import Forward, running
from trl_ext.trainers.step.halving import Halving
from trl_ext.trainers.step.out_of_memory import is_out_of_memory


class ForwardLoop:
    """Runs forwards, in the size that memory allows.

    Args:
        trainer: A trainer with `counts` and `step_settings`.
        why_whole: Why its forwards cannot be cut; "" if they can.

    Attributes:
        last: The forward that runs, or ran last, for messages; None before the first.
        has_forwards: False in a micro-step from which all rows were left out.
        halving: The size of forwards.
    """

    def __init__(self, trainer: Any, why_whole: str):
        self._trainer = trainer
        self._agreement = Agreement(trainer.accelerator)
        self.halving = Halving(trainer, why_whole)
        self.last: Forward | None = None
        self.has_forwards = True

    def run(self, role: str, forwards: Sequence[Forward], attempt: Callable[[Any, bool], None]) -> None:
        """Attempt each forward, in the size in which its role's run by now, or smaller ones.

        Args:
            role: Whose forwards; the critic's may need to be smaller than the actor's.
            forwards: In their order.
            attempt: Called with a forward and whether it is the last; the model is called through `forward`, and after
                it comes the backward.
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
            # Here, where the exception and with it the failed graph is gone.
            self._trainer.counts.roll_back(before)
            clear_device_cache(garbage_collection=True)  # graphs in reference cycles included
            self.halving.halve(role)
            waiting = self.halving.cut(role, waiting)
        if failed is not None:
            self.halving.warn(role, failed)

    def forward(self, model: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `compute` and return what it returns.

        Args:
            model: What it calls, as training calls it.
            compute: The model's call and the loss of the running forward.

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


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What the plain Trainer's step asks while it takes one forward backward, within the trainer's own step.

    Args:
        loss_of_forward: Returns the loss of the forward.
    """

    loss_of_forward: Callable[[], torch.Tensor]

    def prepared(self, batch: Any) -> Any:
        """Replaces `Trainer._prepare_inputs`: a forward's batch is on the device already."""
        return batch

    def loss(self, model: Any, batch: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Replaces `Trainer.compute_loss`: of this forward, not of all that are in the micro-step."""
        return self.loss_of_forward()


class RunsForwards(Trainer):
    """Mixed into a trainer, which plans the forwards of a step and sends its loss through `_one_by_one`."""

    @property
    def _why_whole(self) -> str:
        """Why micro-batches are not cut; "" if they are."""
        return ""

    @cached_property
    def forward_loop(self) -> ForwardLoop:
        """What runs the forwards, and remembers how often they were halved."""
        return ForwardLoop(self, self._why_whole)

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

            inner = InnerStep(kept_loss)
            asked = swapped(self, _prepare_inputs=inner.prepared, compute_loss=inner.loss)
            with gradients_unsynced(self.accelerator, model), asked:
                # The plain Trainer's step: loss, scaling and backward, without generation and step counters.
                Trainer.training_step(self, model, {}, num_items_in_batch)
            losses[-1] = losses[-1].detach()

        loop.run("actor", forwards, attempt)
        if not losses:
            return torch.zeros((), device=self.accelerator.device)
        return sum(losses[:-1], start=losses[-1])
