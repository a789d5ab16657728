"""Rows that try to hang, kill or bloat the process that judges them, and what becomes of each.

A rule in here does what a row's text names; it stands for a parser or a solver that hostile text brings to it.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from plain_rules import row

from trl_ext.rewards.base.rule import Rule, Verdict
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool

LIMITS = Limits(cpu_s=0.3, wall_s=0.6, memory_mib=64, workers=2, chunk=4)


@dataclass(frozen=True, slots=True)
class Blowup(Rule):
    """Does what the text names; a number is its own value."""

    floor = -1.0

    def score(self, row):
        if row.text in DEEDS:
            DEEDS[row.text][0]()
            return Verdict(1.0)
        return Verdict(float(row.text), "ok", "a number")


def spin():
    while True:
        pass


def compute(cpu_s=0.15):
    """Well within the limit."""
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


def spin_in_threads():
    for _ in range(4):
        threading.Thread(target=spin, daemon=True).start()
    time.sleep(60)


def leave_a_spinning_thread():
    threading.Thread(target=spin, daemon=True).start()


def fill_memory():
    kept = []
    while True:
        kept.append(bytearray(2**22))


def call_c_repr():
    """Overflow the C stack, which Python's own limit does not see when it is lifted."""

    class Nested:
        def __repr__(self):
            return f"{[self]!r}"

    sys.setrecursionlimit(10**9)
    repr(Nested())


def recurse():
    return recurse()


def raise_base_exception():
    class Timeout(BaseException):
        pass

    raise Timeout


def ignore_signals():
    for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGPROF, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CPU, (resource.getrlimit(resource.RLIMIT_CPU)[1],) * 2)
    spin()


def on_all_files(data):
    """Write to the worker's connection, among others."""
    for number in range(40):
        try:
            os.write(number, data)
        except OSError:
            continue
    time.sleep(60)


def forged(**retire):
    """A line that says that the row is right, as a worker would write it, for every place in the chunk."""
    report = {"value": 1.0, "status": "ok", "detail": "", "ms": 0.1, "imported": [], **retire}
    return b"".join(json.dumps(report | {"seal": str(place)}).encode() + b"\n" for place in range(1, 5))


def endless_line():
    while True:
        for number in range(3, 40):
            try:
                os.write(number, b"0" * 65536)
            except OSError:
                continue


def fork_bomb(generations=5):
    """32 processes that sleep."""
    for _ in range(generations):
        os.fork()
    time.sleep(60)


def leave_a_child():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)


def leave_a_daemon():
    """A grandchild in a session of its own, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.wait()


def detach_and_spin():
    leave_a_daemon()
    spin()


# Name: what it does, statuses that it may end with.
DEEDS = {
    "spin": (spin, {"timeout"}),
    "sleep": (lambda: time.sleep(60), {"timeout"}),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), {"timeout"}),
    "sum": (lambda: sum(count()), {"timeout"}),
    "power": (lambda: 9**9**9, {"timeout", "too_complex"}),
    "regex": (lambda: re.fullmatch("(a+)+b", "a" * 60), {"timeout"}),
    "threads": (spin_in_threads, {"timeout"}),
    "ignore_signals": (ignore_signals, {"timeout"}),
    "fork_bomb": (fork_bomb, {"timeout"}),
    "detach_and_spin": (detach_and_spin, {"timeout"}),
    "allocate": (lambda: bytearray(10 * 2**30), {"too_complex"}),
    "fill_memory": (fill_memory, {"too_complex", "timeout"}),
    "recurse": (recurse, {"too_complex"}),
    "nested_json": (lambda: json.loads("[" * 10**5), {"too_complex"}),
    "c_stack": (call_c_repr, {"crashed", "too_complex", "timeout"}),
    "exit": (lambda: os._exit(0), {"crashed"}),
    "sys_exit": (sys.exit, {"crashed"}),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), {"crashed"}),
    "terminate": (lambda: os.kill(os.getpid(), signal.SIGTERM), {"crashed"}),
    "abort": (os.abort, {"crashed"}),
    "segfault": (lambda: ctypes.string_at(0), {"crashed"}),
    "base_exception": (raise_base_exception, {"crashed"}),
    "close_files": (lambda: (os.closerange(0, 64), time.sleep(60)), {"crashed"}),
    "junk": (lambda: on_all_files(b"junk\n{}\n[1]\n"), {"crashed"}),
    "forged_report": (lambda: on_all_files(forged(retire=False)), {"crashed"}),
    "forged_end": (lambda: on_all_files(forged(retire=True) * 2), {"crashed"}),
    "nested_line": (lambda: on_all_files(b"[" * 10**5 + b"\n"), {"crashed"}),
    "endless_line": (endless_line, {"crashed", "timeout"}),
    "flood_stdout": (lambda: [print("0" * 10**6) for _ in count()], {"timeout"}),
    "compute": (compute, {"ok"}),
    "compute_again": (compute, {"ok"}),
    "leave_thread": (leave_a_spinning_thread, {"ok"}),
    "leave_child": (leave_a_child, {"ok"}),
    "leave_daemon": (leave_a_daemon, {"ok"}),
    "leave_alarm": (lambda: signal.setitimer(signal.ITIMER_REAL, 0.05), {"ok"}),
}
STOPPED = [name for name, (_, statuses) in DEEDS.items() if statuses != {"ok"}]


def judge_all(limits=LIMITS):
    """Every deed between two numbers, in one call: (text, value, status, milliseconds) of each row."""
    texts = [text for index, name in enumerate(DEEDS) for text in (str(index), name)]
    with WorkerPool(limits) as pool:
        results = pool.submit((Blowup(), row(text)) for text in texts).result()
    return [
        (text, result.verdict.value, result.verdict.status, result.ms)
        for text, result in zip(texts, results, strict=True)
    ]


def judge_all_into(connection):
    """`judge_all` for a spawned process."""
    connection.send(judge_all())


def marked_processes(mark):
    """Servers and workers, and what they forked, with this text in their first environment."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if is_marked(path, mark)}


def is_marked(process, mark):
    try:
        ours = b"workers.server" in (process / "cmdline").read_bytes()
        return ours and mark.encode() in (process / "environ").read_bytes()
    except OSError:
        return False
