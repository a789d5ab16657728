"""Output that never ends a run: after a failed write, standard output or error goes to the null device.

A pipe loses its reader (`| head`, `| tee log` and Ctrl-C, a closed ssh session), a log's disk is full, a terminal has
hung up: training goes on, with the same exit code. The lowest layer of Python's two streams is replaced in place, so
this holds for all who write to them: print, rich, tqdm, loggers, callbacks, and Python's last flush before it exits.
"""

import os
import select
import sys
from contextlib import suppress
from functools import partial
from io import FileIO, TextIOWrapper
from typing import Any

_STANDARD = (1, 2)


def ignore_failed_writes() -> None:
    """Let no write to standard output or error raise an error from now on, in this process and its forks.

    Other streams, such as a notebook's, stay as they are.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        buffer = getattr(stream, "buffer", None)
        raw: Any = getattr(buffer, "raw", buffer)  # `python -u` has no buffer between
        if not isinstance(stream, TextIOWrapper) or type(raw) is not FileIO or raw.closed:
            continue
        if raw.fileno() not in _STANDARD:
            continue
        if "write" not in vars(raw):
            raw.write = partial(_write, raw, FileIO.write)  # type: ignore[method-assign]
        if stream.errors in ("strict", "surrogateescape"):  # a letter that the terminal's encoding lacks is an error
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def write_at_once(text: str) -> None:
    """Write to standard error from a signal handler, which may have interrupted `print`; an error is ignored."""
    if sys.__stderr__ is not None:  # else descriptor 2 may be any file
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def _write(raw: FileIO, write: Any, data: Any) -> int:
    """Write all of `data` by `FileIO.write`, and wait where a stream does not block; return the number of bytes."""
    left = memoryview(data)
    try:
        while left:
            if num_bytes := write(raw, left):
                left = left[num_bytes:]
            else:
                select.select([], [raw], [])
    except OSError:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, raw.fileno())
            os.close(null)
    return memoryview(data).nbytes
