"""Mixed into the trainers: a forward that runs out of memory is taken again in halves, with the same gradients.

Before the first failure a micro-batch costs what it did: with several processes two small integers more, with one
process nothing. After it the run keeps the smaller size.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer
from transformers.utils import logging

from trl_ext.compat.swap import swapped
from trl_ext.trainers.gradient_sync import gradients_unsynced
from trl_ext.trainers.memory.oom.agreement import Agreement, SplitNeeded, why_ranks_cannot_agree
from trl_ext.trainers.memory.oom.chunks import Chunks, cut
from trl_ext.trainers.memory.oom.errors import is_out_of_memory
from trl_ext.trainers.memory.oom.message import explained
from trl_ext.trainers.memory.oom.rollback import MetricsRollback

logger = logging.get_logger(__name__)
Forward = Callable[[Any], torch.Tensor]


class Rescue:
    """Runs micro-batches in chunks, and remembers in how many.

    Args:
        trainer: A trainer with `_metrics` and `_tokens`.
        chunks: How its micro-batches are cut.
        why_not: Why its loss cannot be cut; "" if it can.

    Attributes:
        share: What the loss of the running chunk is multiplied with.
        serving: What answers for `compute_loss` while the Trainer's own step runs a chunk.
        batch: The chunk that runs, or ran last; None before the first.
    """

    def __init__(self, trainer: Any, chunks: Chunks, why_not: str = ""):
        self._trainer = trainer
        self._agreement = Agreement(trainer.accelerator)
        self._halvings: dict[str, int] = defaultdict(int)
        self._has_warned = False
        self.chunks = chunks
        splits = getattr(trainer.args, "memory_on_oom", "split") == "split"
        self.why_not = (
            (why_ranks_cannot_agree(trainer.accelerator) or why_not) if splits else "memory_on_oom is 'raise'"
        )
        self.share: Any = 1.0
        self.serving: Forward | None = None
        self.batch: Any = None

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the actor's next micro-batch, if it has as many rows."""
        return 2 ** self._halvings["actor"]

    def run(self, role: str, whole: Any, attempt: Callable[[Any, bool], None]) -> None:
        """Attempt a micro-batch, or the chunks in which its kind runs by now, or smaller ones.

        Args:
            role: Whose forward; the critic's may need other chunks than the actor's.
            whole: The micro-batch.
            attempt: Called with a chunk and whether it is the last; its forward goes through `forward`, and after it
                comes its backward.
        """
        at_start, sizes, has_failed = MetricsRollback(self._trainer), [], False
        waiting = [whole] if self.why_not else cut(self.chunks, whole, self._halvings[role])
        while waiting:
            before, chunk = MetricsRollback(self._trainer), waiting[0]
            self.batch = chunk
            try:
                with swapped(self, share=1.0 if chunk is whole else self.chunks.share(chunk, whole)):
                    attempt(chunk, len(waiting) == 1)
            except SplitNeeded:
                has_failed = True
            else:
                sizes.append(self.chunks.num_rows(waiting.pop(0)))
                continue
            # Here, where the exception and with it the failed graph is gone.
            before.roll_back()
            clear_device_cache(garbage_collection=True)  # graphs in reference cycles included
            self._halvings[role] += 1
            waiting = [half for chunk in waiting for half in self.chunks.halves(chunk)]
        if len(sizes) > 1:
            at_start.merge(sizes)
        if has_failed:
            self._warn(sizes)

    def forward(self, model: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `compute` and return what it returns.

        Args:
            model: What it calls, as training calls it.
            compute: Forward and loss of the running chunk.

        Raises:
            SplitNeeded: Memory ran out on some rank, and all can cut their chunk.
        """
        if self.why_not or self.chunks.is_smallest_everywhere(self.batch):
            return compute()
        is_stuck = self.chunks.num_rows(self.batch) < 2
        if self._trainer.accelerator.num_processes > 1:
            with self._agreement.over(model, is_stuck):
                return compute()
        try:
            return compute()
        except RuntimeError as error:
            if is_stuck or not is_out_of_memory(error):
                raise
        raise SplitNeeded

    def _warn(self, sizes: list[int]) -> None:
        if self._has_warned or not self._trainer.accelerator.is_main_process:
            return
        self._has_warned = True
        advice = self.chunks.advice(len(sizes))
        sizes = [size for size in sizes if size]
        parts = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        logger.warning(
            f"Out of memory in a forward of {sum(sizes)} rows; from here they run as {parts} with the same "
            f"gradients.{f' Set {advice} for the next run.' if advice else ''}"
        )


class OutOfMemoryRescue(Trainer):
    """Mixed into a trainer, which tells how its micro-batches are cut and sends its loss through `_rescued`."""

    def _chunks(self) -> tuple[Chunks, str]:
        """Cutter of micro-batches, and a reason why they cannot be cut; "" if they can."""
        raise NotImplementedError

    @cached_property
    def _rescue(self) -> Rescue:
        return Rescue(self, *self._chunks())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Overrides transformers.Trainer.train: out of memory ends with what would fit."""
        try:
            return super().train(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise explained(error, self) from error

    def _rescued(
        self,
        compute: Callable[..., Any],
        model: torch.nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Call `compute` with these arguments; in training in chunks where memory asks for it.

        All chunks but the last go forward and backward in here. What is returned has the value of the whole loss, and
        the gradient of the last chunk.
        """
        rescue = self._rescue
        if return_outputs or not torch.is_grad_enabled():
            return compute(model, inputs, return_outputs, num_items_in_batch)
        if rescue.serving is not None:
            return rescue.serving(inputs)
        losses: list[torch.Tensor] = []

        def forward(chunk: Any) -> torch.Tensor:
            loss = rescue.forward(model, lambda: compute(model, chunk, False, num_items_in_batch))
            losses.append(loss)
            return loss

        def attempt(chunk: Any, is_last: bool) -> None:
            if is_last:
                forward(chunk)
                return
            with gradients_unsynced(self.accelerator, model), swapped(rescue, serving=forward):
                # The plain Trainer's step: forward, scaling and backward, without generation and step counters.
                Trainer.training_step(self, model, chunk, num_items_in_batch)
            losses[-1] = losses[-1].detach()

        rescue.run("actor", inputs, attempt)
        return sum(losses[:-1], start=losses[-1])
