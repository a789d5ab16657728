"""The allocations and frees of a simulation, in order, and what the allocator's replica makes of them.

Recorded as one number an event, so that a simulation of a million events costs eight megabytes, and replayed where the
answer is read: for either policy of the allocator and any card.
"""

import base64
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_ext.twin.allocator import CachingAllocator

LOAD = "load"
_EMPTY, _LAND = "(cache emptied)", "(weights on the card)"


@dataclass(slots=True)
class Trace:
    """The allocations and frees of one simulation, in their order.

    Args:
        events: Of an allocation its bytes, more than 0; of a free -1 less the number of the allocation, which are
            numbered in their order from 0 on.
        marks: (Number of events before, name of the phase that begins or one of the two words above).
    """

    events: "array[int]" = field(default_factory=lambda: array("q"))
    marks: list[tuple[int, str]] = field(default_factory=list)
    num_allocations: int = 0

    def allocate(self, num_bytes: int) -> int:
        """Record an allocation, and return its number."""
        self.events.append(num_bytes)
        self.num_allocations += 1
        return self.num_allocations - 1

    def free(self, number: int) -> None:
        """Record that an allocation is over."""
        self.events.append(-1 - number)

    def begin(self, phase: str) -> None:
        """Record that a phase begins: what follows belongs to it."""
        self.marks.append((len(self.events), phase))

    def empty_cache(self) -> None:
        """Record a call of `torch.cuda.empty_cache`."""
        self.marks.append((len(self.events), _EMPTY))

    def land(self) -> None:
        """Record that weights reach the card. All until here was host memory; what is left of it moves to the card
        now, in the order of its making."""
        self.marks.append((len(self.events), _LAND))

    def packed(self) -> dict[str, Any]:
        """The trace as JSON values, to be read on the same machine."""
        text = base64.b64encode(zlib.compress(self.events.tobytes(), level=1)).decode()
        return {"events": text, "marks": self.marks, "num_allocations": self.num_allocations}

    @classmethod
    def unpacked(cls, values: Mapping[str, Any]) -> "Trace":
        events = array("q")
        events.frombytes(zlib.decompress(base64.b64decode(values["events"])))
        return cls(events, [(place, word) for place, word in values["marks"]], values["num_allocations"])


@dataclass(frozen=True, slots=True)
class Replay:
    """What the replica of the allocator reserved for a trace.

    Args:
        reserved_bytes: The most that was reserved at once, by phase.
        num_retries: How often it had to empty its cache to stay under the cap.
        failed_in: The phase that did not fit even so; "" if all do. Later phases are then missing.
    """

    reserved_bytes: Mapping[str, int]
    num_retries: int = 0
    failed_in: str = ""

    @property
    def peak_bytes(self) -> int:
        """Reserved bytes of the worst phase, loading left out."""
        return max((num for phase, num in self.reserved_bytes.items() if phase != LOAD), default=0)


def replay(trace: Trace, expandable: bool, cap_bytes: int | None = None) -> Replay:
    """Feed a trace to the replica of the allocator.

    The cap holds from the end of loading on: what loading needs beside what stays, DeepSpeed's flat copy of the
    weights, is made in host memory where the card has no room for it.

    Args:
        trace: The allocations and frees of a simulation.
        expandable: True for `expandable_segments:True`, False for native segments.
        cap_bytes: What the card has for it; None for no end.
    """
    allocator = CachingAllocator(expandable)
    number = _land(trace, allocator)
    phase, peaks = LOAD, {LOAD: allocator.peak_reserved}
    for events, word in _stretches(trace):
        try:
            number = _play(events, number, allocator)
        except MemoryError:
            return Replay(peaks, allocator.num_retries, failed_in=phase)
        peaks[phase] = max(peaks.get(phase, 0), allocator.peak_reserved)
        if word == _EMPTY:
            allocator.empty_cache()
        elif phase == LOAD and word != LOAD:
            allocator.cap_bytes = cap_bytes
            if cap_bytes is not None and allocator.reserved > cap_bytes:
                allocator.empty_cache()
        phase = phase if word == _EMPTY else word
        allocator.reset_peak()
    return Replay(peaks, allocator.num_retries)


def _landing(trace: Trace) -> int:
    """The number of events before the last landing."""
    return max((place for place, word in trace.marks if word == _LAND), default=0)


def _land(trace: Trace, allocator: CachingAllocator) -> int:
    """Allocate what is left of host memory, and return the number of the first allocation after it."""
    left: dict[int, int] = {}
    number = 0
    for event in trace.events[: _landing(trace)]:
        if event > 0:
            left[number] = event
            number += 1
        else:
            del left[-1 - event]
    for key, num_bytes in left.items():
        allocator.allocate(key, num_bytes)
    return number


def _stretches(trace: Trace) -> Iterable[tuple["array[int]", str]]:
    """Yield the events between two marks with the word of the second, and at the end the rest with its phase."""
    begin, phase = _landing(trace), LOAD
    for place, word in trace.marks:
        if place < begin or word == _LAND:
            continue
        yield trace.events[begin:place], word
        begin, phase = place, phase if word == _EMPTY else word
    yield trace.events[begin:], phase


def _play(events: "array[int]", number: int, allocator: CachingAllocator) -> int:
    """Hand the events to the allocator, and return the number of the next allocation."""
    for event in events:
        if event > 0:
            allocator.allocate(number, event)
            number += 1
        else:
            allocator.free(-1 - event)
    return number
