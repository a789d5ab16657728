"""The trainer's end of the pool: a thread that starts the fork server, sends requests and collects verdicts.

The server is a child process without `multiprocessing`: it starts from any thread, from an event loop and in a
daemonic process, and does not run the user's script again.
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
from collections import Counter
from dataclasses import asdict
from typing import Any

from trl_ext.errors import RuleError
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.wire import Request, Stream, frame, wait

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
        for data in stream.lines():
            self.hear_line(json.loads(data))
        if there:
            return
        self.stop_server()
        for number, request in list(self.requests.items()):
            if request.sends <= RESENDS:
                self.forward(number)  # To a new server.
            else:
                self.drop("the workers' server died twice", number)

    def hear_line(self, report: dict[str, Any]) -> None:
        """Handle a verdict, an error from loading the rules, or a number of restarts."""
        if "restarts" in report:
            self.counts["restarts"] += report["restarts"]
            return
        request = self.requests[report["batch"]]
        if "error" in report:
            del self.requests[report["batch"]]
            request.future.set_exception(RuleError(f"A rule cannot be loaded in a worker: {report['error']}"))
        elif request.take(report):
            del self.requests[report["batch"]]
            request.finish()

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
