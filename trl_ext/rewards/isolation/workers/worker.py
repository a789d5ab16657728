"""The code of a worker: judges row after row and reports each.

The process is a fork of the fork server, so rules and their libraries are loaded. It exits after a row that left a
thread, a child process or much used memory.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trl_ext.rewards.base.rule import as_verdict
from trl_ext.rewards.isolation.workers.confine import (
    address_space_bytes,
    confine,
    has_children,
    num_threads,
    renew_limits,
)
from trl_ext.rewards.isolation.workers.imports import ImportWatch
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import LENGTH, line, load

MIB = 2**20
# A worker that has kept this share of a row's memory is replaced, so that later rows have enough.
KEPT_FRAC = 0.25
DETAIL_CHARS = 4000
STARTED = line("started")  # sent when a chunk is read and its first row begins


def serve(sock: socket.socket, rules: Sequence[Any], limits: Limits, parent: int) -> NoReturn:
    """Judge chunks until the server closes the connection."""
    confine(parent)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # Hostile text must not fill a run's log.
        os.dup2(null, number)
    signal.set_wakeup_fd(-1)
    for unhandled in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
        signal.signal(unhandled, signal.SIG_DFL)
    sock.setblocking(True)
    first_bytes = address_space_bytes()
    kept_bytes = int(KEPT_FRAC * limits.memory_mib * MIB)
    watch = ImportWatch(sock)
    sys.meta_path.insert(0, watch)
    while True:
        seal, tasks = load(exactly(sock, LENGTH.unpack(exactly(sock, LENGTH.size))[0]))
        chunk = [(rules[rule], loaded(row), patient) for rule, row, patient in tasks]
        bytes_now = address_space_bytes()
        sock.sendall(STARTED)
        for number, (rule, row, patient) in enumerate(chunk):
            bounds = limits.patient if patient else limits
            renew_limits(bounds.cpu_s, bytes_now + bounds.memory_mib * MIB)
            watch.begin()
            report = judged(rule, row, bounds) | {"imported": watch.imported()}
            report["seal"] = f"{seal}{len(chunk) - number}"
            bytes_now = address_space_bytes()
            # The next row would be charged for the remains of this row.
            report["retire"] = num_threads() > 1 or has_children() or bytes_now - first_bytes > kept_bytes
            sock.sendall(line(report))
            if report["retire"]:
                os._exit(0)


def exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes from the connection; exit if it closes."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), MIB))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def loaded(row: bytes) -> Any:
    """Return the row, or the exception from loading it."""
    try:
        return load(row)
    except Exception as error:  # A pickle may raise anything: it runs constructors of the dataset's types.
        return error


def judged(rule: Any, row: Any, limits: Limits) -> dict[str, Any]:
    """Return the verdict on a row as a message; the value "floor" means the rule's floor."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # An alarm of the last row.
    began, cpu_began = time.monotonic(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # The kernel ends the process, to its clock's tick.
    value, status, detail = verdict_of(rule, row, limits)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - cpu_began > limits.cpu_s and status != "error":
        value, status, detail = "floor", "timeout", cpu_sentence(limits)
    milliseconds = 1000 * (time.monotonic() - began)
    return {"value": value, "status": status, "detail": detail[:DETAIL_CHARS], "ms": milliseconds}


def verdict_of(rule: Any, row: Any, limits: Limits) -> tuple[Any, str, str]:
    """Return value, status and detail of a row.

    The completion causes a full stack, full memory or an exit; the rule causes any other exception.
    """
    try:
        if isinstance(row, Exception):
            raise row
        verdict = as_verdict(rule.score(row))
        return verdict.value, str(verdict.status), str(verdict.detail)
    except MemoryError:
        return "floor", "too_complex", f"needed more than {limits.memory_mib} MiB of memory"
    except RecursionError:
        return "floor", "too_complex", "nested deeper than Python's stack"
    except Exception as error:  # The caller decides what to do about it.
        try:
            # Type, message and place on the first line, then the traceback.
            place = traceback.extract_tb(error.__traceback__)[-1]
            trace = "".join(traceback.format_exception(error, limit=-20))
            where = f"{Path(place.filename).name} line {place.lineno}"
            return None, "error", f"{type(error).__name__}: {str(error)[:500]} ({where})\n{trace}"
        except Exception:  # The error's __str__ raises.
            return None, "error", f"{type(error).__name__}, which cannot be shown"
    except BaseException as error:
        return "floor", "crashed", f"{type(error).__name__} was raised"


def cpu_sentence(limits: Limits) -> str:
    return f"used more than {limits.cpu_s:g} s of processor time"
