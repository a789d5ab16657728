"""Wall-clock seconds of a step by phase: a stopwatch with named, nested phases.

At any time exactly one phase is charged, the innermost open phase, so no second counts twice. A clock belongs to one
thread. It uses no CUDA events; give `sync` instead.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds per named phase since the last `take()`.

    Args:
        sync: Called before every reading of the clock, e.g. `torch.cuda.synchronize`, so that running kernels are
            charged to the phase that launched them. None reads the clock at once.
        outside: Name to charge for the time between phases, from the first phase on. None drops that time.

    Example:
        >>> clock = PhaseClock(outside="other")
        >>> with clock.phase("generate"):
        ...     with clock.phase("logps"):
        ...         pass
        >>> sorted(clock.take())
        ['generate', 'logps', 'other']
    """

    def __init__(self, sync: Callable[[], None] | None = None, outside: str | None = None) -> None:
        self._sync = sync
        self._outside = outside
        self._open: list[str] = []
        self._whole: str | None = None
        self._seconds: dict[str, float] = {}
        self._last_reading_s: float | None = None
        # Called with the charged name at every reading: the memory audit reads its meter then.
        self.on_charge: Callable[[str | None], None] | None = None

    @contextmanager
    def phase(self, name: str, whole: bool = False) -> Iterator[None]:
        """Charge the seconds of the `with` block to `name`, without phases opened inside it unless `whole` is set."""
        outer = self._whole
        is_same = self._open[-1:] == [outer or name]  # then nothing needs to wait for the device
        if not is_same:
            self.mark()
        self._open.append(outer or name)
        self._whole = outer or (name if whole else None)
        try:
            yield
        finally:
            if not is_same:
                self.mark()
            self._open.pop()
            self._whole = outer

    def take(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, and start again. Open phases stay open."""
        if self._last_reading_s is not None:  # None before the first phase, which starts the clock
            self.mark()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def mark(self) -> None:
        """Charge the time since the last reading to the innermost open phase, or to `outside`."""
        if self._sync is not None:
            self._sync()
        now_s = time.perf_counter()
        name = self._open[-1] if self._open else self._outside
        if name is not None and self._last_reading_s is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._last_reading_s
        self._last_reading_s = now_s
        if self.on_charge is not None:
            self.on_charge(name)
