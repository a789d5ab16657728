"""Messages between trainer, fork server and workers: pickles to the workers, JSON lines back.

A worker has read hostile text, so its messages are never unpickled. A pickle is a length and that many bytes; a line
ends with a newline and has a maximum length.
"""

import io
import json
import pickle
import select
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from trl_ext.errors import RuleError

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
        if module == "__main__":
            raise RuleError(
                f"'{name}' is defined in the script that is being run, which workers do not run again. Put it into a "
                "separate module and import it from there."
            )
        return super().find_class(module, name)


def load(data: bytes) -> Any:
    """Load a pickle from the parent process."""
    return Loader(io.BytesIO(data)).load()
