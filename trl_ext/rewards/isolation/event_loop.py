"""One event loop per process, in a thread of its own, for rules that wait for servers.

The caller's thread only waits for results, so that it may run an event loop itself, as Jupyter does, and so that TRL's
own loop for `async def` rewards is not touched. A forked process starts a loop of its own.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run_in_loop(coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
    """Start a coroutine in this process's loop; cancelling the future cancels it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # A daemon: a server that does not answer must not keep the process from ending.
            threading.Thread(target=_loop.run_forever, name="trl_ext-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, _loop)


def _forget() -> None:
    """Forget the parent's loop, whose thread a forked child does not have, and its lock, which may be held."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
