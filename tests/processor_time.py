"""How much processor time a call takes, without what other tests have left behind."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """The result of a call, and the seconds of processor time that this thread took for it.

    No garbage is collected meanwhile: one collection of what a thousand other tests have made takes a second. Other
    threads of this process do not count, nor does the time of waiting for a processor.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start_s = time.thread_time()
        result = call()
        return result, time.thread_time() - start_s
    finally:
        if was_enabled:
            gc.enable()
