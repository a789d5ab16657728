"""Messages between trainer, fork server and workers: pickles to the workers, JSON lines back.

A worker has read hostile text, so its messages are never unpickled. A pickle is a length and that many bytes; a line
ends with a newline and has a maximum length.

A worker's row holds an image's path and size instead of its pixels: a photo would be megabytes per row and rule, even
for rules that ignore images. A rule in the trainer's process gets the image.
"""

import io
import json
import pickle
import select
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from trl_ext.errors import DataError, RuleError
from trl_ext.rewards.base.rule import UNREAD, Row, Rule, Verdict

LENGTH = struct.Struct("!Q")
# No honest line is so long: details are cut at 4,000 characters, each at most 12 bytes in JSON.
LARGEST_LINE_BYTES = 1 << 17
READ_BYTES = 1 << 18


class Stream:
    """One end of a socket that never blocks: unsent bytes wait in `outbox`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.outbox = bytearray()
        self.inbox = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def post(self, data: bytes) -> None:
        """Keep data for the next `flush`."""
        self.outbox += data

    def send(self, data: bytes) -> None:
        """Send as much as possible now, keep the rest."""
        self.post(data)
        self.flush()

    def flush(self) -> None:
        """Send more of the outbox. A broken connection empties it; `receive` then returns False."""
        try:
            while self.outbox:
                with memoryview(self.outbox) as view:
                    sent = self.sock.send(view[:READ_BYTES])
                del self.outbox[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()

    def receive(self) -> bool:
        """Read available bytes into the inbox; return False at the end of the connection."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.inbox += data
        return bool(data)

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines of the inbox; ValueError at a line that is too long."""
        end = self.inbox.rfind(b"\n") + 1
        lines = bytes(self.inbox[:end]).split(b"\n")[:-1]
        del self.inbox[:end]
        for one in lines:
            check_length(one)
            yield one
        check_length(self.inbox)

    def frames(self) -> list[bytes]:
        """Return the complete pickles of the inbox, not loaded yet."""
        frames = []
        while len(self.inbox) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.inbox)[0]
            if len(self.inbox) < end:
                break
            frames.append(bytes(self.inbox[LENGTH.size : end]))
            del self.inbox[:end]
        return frames


def check_length(data: bytes | bytearray) -> None:
    """Raise ValueError for a line that no honest process sends."""
    if len(data) > LARGEST_LINE_BYTES:
        raise ValueError(f"a line of at least {len(data)} bytes")


def wait(streams: Iterable[Stream], others: Iterable[int], timeout_s: float | None) -> set[int]:
    """Return file numbers that can be read (or written, if an outbox waits); empty after `timeout_s`."""
    poll = select.poll()
    for number in others:
        poll.register(number, select.POLLIN)
    for stream in streams:
        poll.register(stream.fileno(), select.POLLIN | (select.POLLOUT if stream.outbox else 0))
    return {number for number, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))}


def frame(message: Any) -> bytes:
    """Return a message as a pickle after its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def line(message: Any) -> bytes:
    """Return a message as a line of JSON, lone surrogates escaped."""
    return json.dumps(message).encode("ascii") + b"\n"


class Loader(pickle.Unpickler):
    """Loads pickles of the parent process; refuses classes of the user's script."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", "__mp_main__"):  # the second: in a process that the script has spawned
            raise RuleError(
                f"'{name}' is defined in the script that is being run, which workers do not run again. Put it into a "
                "separate module and import it from there."
            )
        return super().find_class(module, name)


def load(data: bytes) -> Any:
    """Load a pickle from the parent process."""
    return Loader(io.BytesIO(data)).load()


@dataclass(frozen=True, slots=True)
class Judged:
    """A row's verdict and its time.

    Args:
        ms: Milliseconds from the row's start on; 0.0 for a row that never began.
        failed: True if the machine or a server failed, so that a breaker counts the row.
        late: True if the row was stopped, or never began because others were: its rule gave no verdict.
    """

    verdict: Verdict
    ms: float
    failed: bool = False
    late: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A call's tasks, ready to be sent.

    Args:
        rules: Pickles of the different rules.
        rows: Of each task, the index of its rule and the row as a pickle that only a worker opens.
        floors: Of each task, its rule's floor.
        future: Gets the verdicts.
        judged: Verdicts so far, by the task's index.
        sends: Times that it was sent to a server; it is sent again if its server dies.
        late_at: When its server counts as dead (monotonic clock).
    """

    rules: list[bytes]
    rows: list[tuple[int, bytes]]
    floors: list[float]
    future: "Future[list[Judged]]"
    judged: dict[int, Judged] = field(default_factory=dict)
    sends: int = 0
    late_at: float = 0.0

    def open_rows(self) -> list[tuple[int, int, bytes]]:
        """Return index, rule's index and row of the tasks without a verdict."""
        return [(index, *row) for index, row in enumerate(self.rows) if index not in self.judged]

    def take(self, report: dict[str, Any]) -> bool:
        """Record a verdict; return True if no task is open."""
        index, value, status = report["row"], report["value"], report["status"]
        # A "timeout" from the rule, for instance of a program in its sandbox, has a value.
        is_late = (value, status) == ("floor", "timeout") or (status == "infra_error" and not report["machine"])
        value = self.floors[index] if value == "floor" else value
        self.judged[index] = Judged(Verdict(value, status, report["detail"]), report["ms"], report["machine"], is_late)
        return len(self.judged) == len(self.rows)

    def fail(self, detail: str) -> None:
        """Give the open rows no value, because the machine failed."""
        failure = {"value": None, "status": "infra_error", "detail": detail, "ms": 0.0, "machine": True}
        for index, _, _ in self.open_rows():
            self.take({"row": index, **failure})

    def finish(self) -> None:
        """Set the future's result; every task has a verdict."""
        self.future.set_result([self.judged[index] for index in range(len(self.rows))])


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image without its pixels.

    Args:
        path: Its file; empty if the image is only in the trainer's memory.
        size: Width and height in pixels.
        mode: PIL's name of the pixel format, such as "RGB".
    """

    path: str
    size: tuple[int, int]
    mode: str

    def open(self) -> Any:
        if not self.path:
            raise RuleError(
                "This image has no file, and rules in workers get images by reference. Set tier = 'inline' in the "
                "rule, or keep the dataset's images as files."
            )
        from PIL import Image

        return Image.open(self.path)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, sys.modules["PIL.Image"].Image):
            return ImageReference, (str(getattr(thing, "filename", "") or ""), thing.size, thing.mode)
        return NotImplemented


def packed(tasks: Sequence[tuple[Rule, Row]], future: "Future[list[Judged]]") -> Request:
    """Return the tasks as a request, each rule once."""
    rules = {id(rule): rule for rule, _ in tasks}
    places = {key: place for place, key in enumerate(rules)}
    rows = []
    for index, (rule, row) in enumerate(tasks):
        if not rule.reads_group and row.group is not UNREAD:
            row = replace(row, group=UNREAD)  # Otherwise each row would carry the texts of all.
        rows.append((places[id(rule)], pickled_row(row, index)))
    floors = [float(rule.floor) for rule, _ in tasks]
    return Request([pickled_rule(rule) for rule in rules.values()], rows, floors, future)


def pickled_rule(rule: Rule) -> bytes:
    """Pickle a rule by its class's import path, or by value if a script or notebook defines the class."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(rule))
    except Exception as error:  # The fields' types may raise anything.
        raise RuleError(
            f"Rule '{rule.name}' cannot be sent to a worker: {type(error).__name__}: {error}. Give it plain fields, "
            "and make what does not pickle (locks, models, open files) inside score()."
        ) from error


def pickled_row(row: Row, index: int) -> bytes:
    """Pickle a row, each PIL image as an ImageReference; DataError if that fails."""
    buffer = io.BytesIO()
    pickler = _Pickler if "PIL.Image" in sys.modules else pickle.Pickler
    try:
        pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(row)
    except Exception as error:  # As above.
        raise DataError(
            f"Row {index} cannot be sent to a worker: {type(error).__name__}: {error}. Keep plain data in the prompts "
            "and columns that rules read."
        ) from error
    return buffer.getvalue()
