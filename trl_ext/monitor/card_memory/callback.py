"""The audit in a Trainer: which phase the card's peaks belong to, and a reading for every log entry."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from trl_ext.monitor.card_memory.audit import STEP, MemoryAudit, MemoryMeter
from trl_ext.monitor.phases import PhaseClock


class MemoryWatch(TrainerCallback):
    """Adds `memory/*` to the metrics of the step before they are logged.

    Args:
        meter, audit: Of this rank.
        clock: The trainer's; its phases are the meter's.
        largest: The largest value of each number over ranks; collective, called for entries that are logged only.
        steppers: What has the method `step` that is the optimizer step: torch's optimizers, DeepSpeed's engines.
        note: Takes a metric's key and value.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        audit: MemoryAudit,
        clock: PhaseClock,
        largest: Callable[[list[float]], list[float]],
        steppers: Callable[[], Sequence[Any]],
        note: Callable[[str, float], None],
    ):
        self._meter, self._audit, self._clock = meter, audit, clock
        self._largest, self._steppers, self._note = largest, steppers, note
        self._undo: list[Callable[[], None]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.start()
        self._clock.on_charge = self._meter.charge
        # Up to here the memory is that of the open phase; from here to the end of the step it is the step's.
        self._undo = [_around(one, self._clock.mark, lambda: self._meter.charge(STEP)) for one in self._steppers()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log:
            self._read()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log and args.logging_strategy == "epoch":
            self._read()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.on_charge = None
        for undo in self._undo:
            undo()
        self._undo = []

    def _read(self) -> None:
        self._clock.mark()
        for name, value in self._audit.metrics(self._meter.take().over(self._largest)).items():
            self._note(name, value)


def _around(stepper: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` and `after` around every `step`; returns what undoes it."""
    if isinstance(stepper, torch.optim.Optimizer):
        handles = [
            stepper.register_step_pre_hook(lambda *_: before()),
            stepper.register_step_post_hook(lambda *_: after()),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    step = stepper.step  # a DeepSpeed engine has no hooks, and steps within backward

    def measured_step(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return step(*args, **kwargs)
        finally:
            after()

    stepper.step = measured_step
    return lambda: delattr(stepper, "step")
