"""Measured and predicted memory of a card by phase, once per log entry, with a warning if they differ.

The plan defines the phases. A phase's peak is the most that was allocated at once while it ran, on any rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from trl_ext.monitor.phases import PhaseClock

GIB = 2**30
STEP = "step"
# The clock's phases that are part of another phase of the plan.
_PLAN_PHASE = {"logps": "score"}
TOLERANCE_FRAC = 0.05  # excess of measured over predicted memory that causes a warning


@dataclass(frozen=True, slots=True)
class Reading:
    """Peaks and counts of a card since the last reading.

    Args:
        peak_bytes: Bytes by phase.
        reserved_bytes: Most bytes that the allocator held.
        free_frac: Share of the card that is free now.
        num_retries: Allocations that succeeded only after the cache was emptied.
    """

    peak_bytes: Mapping[str, float]
    reserved_bytes: float
    free_frac: float
    num_retries: float

    def over(self, largest: Callable[[list[float]], list[float]]) -> "Reading":
        """Return the worst of all ranks; `largest` takes the maximum of each number over ranks."""
        *peaks, reserved, used, retries = largest(
            [*self.peak_bytes.values(), self.reserved_bytes, 1 - self.free_frac, self.num_retries]
        )
        return Reading(dict(zip(self.peak_bytes, peaks, strict=True)), reserved, 1 - used, retries)


@dataclass(frozen=True, slots=True)
class MemorySource:
    """The allocator of one CUDA device on this rank; its counters are on the host, so reading them does not wait."""

    device: torch.device

    def peak_bytes(self) -> int:
        """Return the most bytes allocated at once since the last `reset`."""
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        """Return the most bytes that the allocator held at once since the last `reset`."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset(self) -> None:
        """Reset the peaks to the bytes allocated and held now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def num_alloc_retries(self) -> int:
        """Count allocations since the start that succeeded only after the cache was emptied."""
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return free and total bytes of the card, counting all its processes."""
        return torch.cuda.mem_get_info(self.device)


def source_of(device: torch.device) -> MemorySource | None:
    """Return the source for a CUDA device; None for the CPU."""
    return MemorySource(device) if device.type == "cuda" else None


class MemoryMeter:
    """Peaks by phase on this rank; phases other than `phases` (evaluation) count only as reserved."""

    def __init__(self, source: MemorySource, phases: Sequence[str]) -> None:
        self.source = source
        self._peaks = dict.fromkeys(phases, 0.0)
        self._ran: set[str] = set()
        self._reserved = 0.0
        self._num_retries = source.num_alloc_retries()

    def start(self) -> None:
        """Forget earlier peaks, such as the loading of the model."""
        self.source.reset()
        self._reserved = 0.0
        self._num_retries = self.source.num_alloc_retries()

    def charge(self, name: str | None) -> None:
        """Charge the peak since the last call to this phase of the clock; None charges no phase."""
        peak, phase = float(self.source.peak_bytes()), _PLAN_PHASE.get(name or "", name)
        self._reserved = max(self._reserved, float(self.source.peak_reserved_bytes()))
        self.source.reset()
        if phase in self._peaks:
            # A phase that does not run between two readings keeps its previous peak.
            self._peaks[phase] = max(self._peaks[phase], peak) if phase in self._ran else peak
            self._ran.add(phase)

    def take(self) -> Reading:
        """Return the reading since the last call, and start over."""
        free, total = self.source.free_and_total_bytes()
        retries = self.source.num_alloc_retries()
        reading = Reading(dict(self._peaks), self._reserved, free / total, float(retries - self._num_retries))
        self._num_retries, self._reserved, self._ran = retries, 0.0, set()
        return reading


class MemoryAudit:
    """Metrics and warnings from readings.

    Args:
        predicted: The plan's bytes by phase; None without a plan.
        phase_words: Phases as words of a sentence: "while generating".
        remedy: Returns the end of a sentence: what to set if memory is short.
        warn: Prints a sentence; called once per kind of warning.
    """

    def __init__(
        self,
        predicted: Mapping[str, float] | None,
        phase_words: Mapping[str, str],
        remedy: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._predicted, self._phase_words = predicted or {}, phase_words
        self._remedy = remedy
        self._warn = warn
        self._warned: set[str] = set()
        self._is_first = True

    def metrics(self, reading: Reading) -> dict[str, float]:
        """Return keys `memory/*`, the same at every call; the first call adds the predicted values."""
        metrics = {f"memory/{phase}_gib": peak / GIB for phase, peak in reading.peak_bytes.items()}
        metrics["memory/reserved_gib"] = reading.reserved_bytes / GIB
        metrics["memory/free_share"] = reading.free_frac
        metrics["memory/alloc_retries"] = reading.num_retries
        predicted = {phase: self._predicted[phase] for phase in reading.peak_bytes if phase in self._predicted}
        if predicted:
            worst = max(predicted, key=predicted.__getitem__)
            metrics["memory/error_pct"] = 100 * (reading.peak_bytes[worst] / predicted[worst] - 1)
            if self._is_first:
                metrics |= {f"memory/predicted_{phase}_gib": value / GIB for phase, value in predicted.items()}
        self._is_first = False
        self._judge(reading, predicted)
        return metrics

    def _judge(self, reading: Reading, predicted: Mapping[str, float]) -> None:
        excess = {phase: reading.peak_bytes[phase] / value - 1 for phase, value in predicted.items()}
        worst = max(excess, key=excess.__getitem__, default=None)
        if worst is not None and excess[worst] > TOLERANCE_FRAC:
            self._once(
                "excess",
                f"Memory {self._phase_words[worst]} is {reading.peak_bytes[worst] / GIB:.1f} GiB and "
                f"{predicted[worst] / GIB:.1f} were predicted ({excess[worst]:+.1%}). Do not count on the plan's "
                f"reserve: {self._remedy()}",
            )
        if reading.num_retries:
            self._once(
                "retries",
                f"The allocator emptied its cache {reading.num_retries:.0f} times to find room, which costs time: the "
                "card is full or fragmented. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is not; "
                f"else {self._remedy()}",
            )

    def _once(self, kind: str, sentence: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(sentence)


# In a Trainer ------------------------------------------------------------------------------------------------------


class MemoryWatch(TrainerCallback):
    """Callback that adds `memory/*` to the metrics of the step before they are logged.

    Args:
        clock: The trainer's clock, with the meter's phases.
        largest: Takes the maximum of each number over ranks; collective, called only for entries that are logged.
        steppers: Returns the objects whose method `step` is the optimizer step: torch optimizers, DeepSpeed engines.
        note: Records a metric's key and value.
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
        # Before `step`, memory is charged to the open phase; during it, to STEP.
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
    """Call `before` and `after` around every `step`; return a function that undoes this."""
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
