"""Worker processes for rules that may hang, crash or use too much memory on hostile text.

    trainer  --  fork server  --  worker
                              --  worker

`WorkerPool.run` returns a verdict per row for any completions: a row that exceeds its limits is stopped and gets the
rule's floor, and no other row's verdict depends on it. Statuses that the pool adds:

    timeout      used more processor or wall-clock time than `Limits`; the floor
    too_complex  needed more memory than `Limits`, or nested deeper than Python's stack; the floor
    crashed      ended its worker, or broke its connection; the floor
    error        the rule raised; no value; the detail holds error, place and traceback
    infra_error  no worker could start, or the call's time was over before the row began; no value

In the trainer, a thread starts the fork server, sends requests and collects verdicts. The server is a child process
without `multiprocessing`: it starts from any thread, from an event loop and in a daemonic process, and does not run
the user's script again.

On other systems than Linux, rules run in the caller's process without limits, and a warning is given once.
"""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache
from typing import Any, Self

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, as_verdict
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Judged, Request, Stream, frame, packed, wait

# Added to a call's time limit, for a server that hangs, for instance in the import of a rule's module.
SERVER_GRACE_S = 60.0
STOP_S = 2.0  # time for a server to end its workers
RESENDS = 1  # times that a request is sent again because its server died

# Settings are JSON in the first argument. The module path is the trainer's, so that the server finds the rules.
BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from trl_ext.rewards.isolation.workers.server import main
main(sys.argv[1:])
"""
# One thread per worker for numerical libraries, no GPU, and hashes that do not vary between runs.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
}


class ServerThread:
    """A thread and its server. It adds the number of replaced workers to `counts`."""

    def __init__(self, limits: Limits, counts: Counter[str]) -> None:
        self.limits, self.counts = limits, counts
        self.pid = os.getpid()  # A forked child has this object, but not its thread.
        self.lock = threading.Lock()
        self.closed = False
        self.inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.wake, self.bell = socket.socketpair()
        self.bell.setblocking(False)
        self.process: subprocess.Popen[bytes] | None = None
        self.stream: Stream | None = None
        self.requests: dict[int, Request] = {}
        self.num_requests = 0
        self.thread = threading.Thread(target=self.run, name="trl_ext-workers", daemon=True)
        self.thread.start()

    def send(self, request: Request) -> bool:
        """Queue a request; return False if the thread is closed."""
        with self.lock:
            if not self.closed:
                self.inbox.put(request)
                self.ring()
            return not self.closed

    def close(self) -> None:
        """End the server and its workers; open rows get no value."""
        if self.pid != os.getpid():
            return
        with self.lock:
            self.closed = True
            self.ring()
        if threading.current_thread() is not self.thread:  # A collected pool may be finalised anywhere.
            self.thread.join(2 * STOP_S)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # Full: it will wake anyway. Closed: it has ended.
            self.bell.send(b"!")

    # In the thread

    def run(self) -> None:
        try:
            while not self.closed:
                self.step()
        finally:
            with self.lock:
                self.closed = True
            self.stop_server()
            self.take_inbox()
            self.drop("the pool was closed")
            self.wake.close()
            self.bell.close()

    def step(self) -> None:
        late_at = min((request.late_at for request in self.requests.values()), default=None)
        timeout_s = None if late_at is None else late_at - time.monotonic()
        ready = wait([self.stream] if self.stream else [], [self.wake.fileno()], timeout_s)
        if self.stream and self.stream.fileno() in ready:
            self.hear(self.stream)
        if self.wake.fileno() in ready:
            self.wake.recv(4096)
            for number in self.take_inbox():
                self.forward(number)
        if late_at is not None and time.monotonic() > late_at:
            self.stop_server(0)
            self.drop(f"the workers' server did not answer within {self.limits.batch_s + SERVER_GRACE_S:g} s")

    def take_inbox(self) -> list[int]:
        """Number the new requests; return their numbers."""
        first = self.num_requests
        while not self.inbox.empty():
            self.requests[self.num_requests] = self.inbox.get()
            self.num_requests += 1
        return list(range(first, self.num_requests))

    def forward(self, number: int) -> None:
        """Send a request's open rows to the server; start it if needed."""
        request = self.requests[number]
        request.sends += 1
        request.late_at = time.monotonic() + self.limits.batch_s + SERVER_GRACE_S
        try:
            stream = self.stream or self.start_server()
        except OSError as error:
            self.drop(f"the workers' server could not be started: {error}", number)
            return
        rows = request.open_rows()
        stream.send(frame({"batch": number, "path": search_path(), "rules": request.rules, "rows": rows}))

    def hear(self, stream: Stream) -> None:
        """Read the server's reports; if it has ended, send the open requests once more."""
        stream.flush()
        there = stream.receive()
        for report in map(json.loads, stream.lines()):  # a verdict, an error from loading the rules, or restarts
            if "restarts" in report:
                self.counts["restarts"] += report["restarts"]
                continue
            request = self.requests[report["batch"]]
            if "error" in report:
                del self.requests[report["batch"]]
                request.future.set_exception(RuleError(f"A rule cannot be loaded in a worker: {report['error']}"))
            elif request.take(report):
                del self.requests[report["batch"]]
                request.finish()
        if there:
            return
        self.stop_server()
        for number, request in list(self.requests.items()):
            if request.sends <= RESENDS:
                self.forward(number)  # To a new server.
            else:
                self.drop("the workers' server died twice", number)

    def drop(self, detail: str, number: int | None = None) -> None:
        """End one request, or all; open rows get no value."""
        for key in list(self.requests) if number is None else [number]:
            request = self.requests.pop(key)
            request.fail(detail)
            request.finish()

    def start_server(self) -> Stream:
        """Start the fork server; OSError if the machine cannot start a process."""
        ours, theirs = socket.socketpair()
        limits = asdict(self.limits) | {"workers": self.limits.num_workers}
        settings = {"path": search_path(), "socket": theirs.fileno(), "trainer": os.getpid(), "limits": limits}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C goes to the trainer, which then ends the server.
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.stream = Stream(ours)
        return self.stream

    def stop_server(self, patience_s: float = STOP_S) -> None:
        """Close the connection, which ends the server and its workers; kill it if it does not end."""
        if self.stream is not None:
            self.stream.sock.close()
            self.stream = None
        process, self.process = self.process, None
        if process is not None:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def search_path() -> list[str]:
    """Return the trainer's module path, with the working folder's path for ""."""
    return [path or os.getcwd() for path in sys.path if isinstance(path, str)]


class WorkerPool:
    """Judges rows in processes that can be killed; starts them with the first call.

    Any thread may call it, several at a time. It pickles as its limits: a spawned or forked process starts separate
    workers.

    Args:
        limits: Time and memory of a row, and the number of workers; None for the defaults.

    Example:
        with WorkerPool(Limits(cpu_s=1)) as pool:
            verdicts = pool.run([(rule, row) for row in rows])
    """

    _thread: ServerThread | None

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._reset()

    def run(self, tasks: Iterable[tuple[Rule, Row]]) -> list[Verdict]:
        """Return one verdict per task, in their order. RuleError or DataError if a task cannot be sent to a worker."""
        return [judged.verdict for judged in self.submit(tasks).result()]

    def submit(self, tasks: Iterable[tuple[Rule, Row]]) -> "Future[list[Judged]]":
        """Start `run` and return at once; in an event loop, `await asyncio.wrap_future(pool.submit(tasks))`."""
        tasks = list(tasks)
        future: Future[list[Judged]] = Future()
        future.set_running_or_notify_cancel()  # A sent row cannot be cancelled.
        if not tasks or not supported(sys.platform):
            future.set_result([inline(rule, row) for rule, row in tasks])
            return future
        request = packed(tasks, future)
        while not self._connect().send(request):
            pass
        return future

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    @property
    def restarts(self) -> int:
        """Workers that were replaced, after a stopped row or because a row left a thread, child or memory."""
        return self._counts["restarts"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self.limits,)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread = None
        self._counts: Counter[str] = Counter()

    def _connect(self) -> ServerThread:
        """Return the fork server's thread; start it if needed, also in a forked child, which has no threads."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._thread is None or self._thread.closed:
                self._thread = ServerThread(self.limits, self._counts)  # It must not keep the pool alive.
                weakref.finalize(self, self._thread.close)  # Also at the interpreter's end.
            return self._thread


def shared_pool(limits: Limits) -> WorkerPool:
    """Return this process's pool with these limits, which several rule sets share."""
    return _POOLS.setdefault(limits, WorkerPool(limits))  # Atomic; an unused pool has no processes.


_POOLS: dict[Limits, WorkerPool] = {}


@cache
def supported(platform: str) -> bool:
    """Return True if this system can limit workers; warn once if it cannot."""
    if platform != "linux":
        message = f"Workers need Linux; on {platform} rules run in the trainer's process, where no limit holds them."
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return platform == "linux"


def inline(rule: Rule, row: Row) -> Judged:
    """Judge a row in this process; an exception becomes a verdict, as in a worker."""
    began = time.monotonic()
    try:
        verdict = as_verdict(rule.score(row))
    except Exception as error:  # The caller decides what to do about it.
        verdict = Verdict(None, "error", f"{type(error).__name__}: {error}")
    return Judged(verdict, 1000 * (time.monotonic() - began))
