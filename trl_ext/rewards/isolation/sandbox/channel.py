"""A conversation between two interpreters: each may ask the other to do something with an object that it holds.

The side with the tests calls the candidate's functions here. Data goes by value (`values`), so the tests
compare values of their own exact types, and no object of the candidate's takes part in a comparison with an expected
value. Other objects stay where they are and are spoken to through a `Remote`.

The side with the tests answers calls of functions that it passed as arguments, and nothing else: an attribute of one
of its functions would lead to the expected values.
"""

import builtins
import json
import operator
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from trl_ext.rewards.isolation.sandbox.values import decode, encode

LONGEST_MESSAGE = 4 * 2**20  # bytes

# What may be asked about an object, by name. No operation takes an expected value to compare with.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "attribute": getattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "text": str,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "equal": operator.eq,
    "less": operator.lt,
    "less_equal": operator.le,
}
CALLS_ONLY = frozenset({"call"})
ALL_OPERATIONS = frozenset(_OPERATIONS)


class RemoteError(Exception):
    """An exception of the other side that is none of Python's own."""


class ChannelLost(BaseException):
    """The other side has ended or talks nonsense. No Exception: tests that expect one must not take it for that."""


class Channel:
    """One side of the conversation.

    Args:
        incoming, outgoing: Descriptors.
        allowed: Operations that the other side may ask for.
        names: Objects that the other side may look up by name.
    """

    def __init__(self, incoming: int, outgoing: int, allowed: frozenset[str], names: Mapping[str, Any]) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.allowed, self.names = allowed, names
        self.held: list[Any] = []
        self.lost = False  # Stays true also where a bare `except:` swallows ChannelLost.

    def ask(self, operation: str, subject: Any, *arguments: Any, **named: Any) -> Any:
        """Have the other side do something; its exception is raised here.

        Lists, dicts and sets among the arguments afterwards hold what the other side made of them.
        """
        request = {"do": operation, "on": subject, "with": self._pack(arguments), "named": self._pack(named)}
        self._send(request)
        while True:
            message = self._receive() or self._lose("the code under test has ended")
            if "do" in message:
                self._send(self._answer(message))
            elif "raised" in message:
                raise rebuilt_error(*message["raised"])
            else:
                self._update(arguments, message.get("after"))
                return self._unpack(message["value"])

    def look_up(self, name: str) -> Any:
        """An object of the other side by its name; AttributeError where there is none."""
        return self.ask("name", name)

    def serve(self) -> None:
        """Answer until the other side ends."""
        while (message := self._receive()) is not None:
            self._send(self._answer(message))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "name":
                return {"value": self._pack(self._named(request["on"]))}
            return self._perform(request)
        except Exception as error:  # Whatever the code raises is an answer, as a value is.
            return {"raised": [type(error).__name__, printable(error)]}

    def _named(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(name)
        return self.names[name]

    def _perform(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request["do"]
        if operation not in self.allowed:
            raise ValueError(f"{operation!r} is not answered here")
        arguments, named = self._unpack(request["with"]), self._unpack(request["named"])
        before = [self._pack(argument) if _changeable(argument) else None for argument in arguments]
        value = _OPERATIONS[operation](self._find(request["on"]), *arguments, **named)
        after = [self._pack(argument) if _changeable(argument) else None for argument in arguments]
        return {"value": self._pack(value), "after": after if after != before else None}

    def _find(self, handle: Any) -> Any:
        if not isinstance(handle, int) or not 0 <= handle < len(self.held):
            raise ValueError(f"there is no object {handle!r} here")
        return self.held[handle]

    def _update(self, arguments: tuple[Any, ...], after: Any) -> None:
        for argument, packed in zip(arguments, after or (), strict=False):
            if packed is None or not _changeable(argument):
                continue
            value = self._unpack(packed)
            if type(value) is not type(argument):
                continue
            if isinstance(argument, list):
                argument[:] = value
            else:
                argument.clear()
                argument.update(value)

    def _pack(self, value: Any) -> Any:
        return encode(value, self._export)

    def _unpack(self, data: Any) -> Any:
        return decode(data, self._bring)

    def _export(self, value: Any) -> Any:
        if isinstance(value, Remote) and value._channel is self:
            return ["yours", value._handle]
        self.held.append(value)
        return ["mine", len(self.held) - 1]

    def _bring(self, data: list[Any]) -> Any:
        owner, handle = data
        if owner == "yours":
            return self._find(handle)
        if owner != "mine" or not isinstance(handle, int):
            raise ValueError(f"{owner!r} is no tag of a value")
        return Remote(self, handle)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > LONGEST_MESSAGE:
            if "do" in message:
                raise ValueError(f"{len(data)} bytes are too long for one message")
            data = json.dumps({"raised": ["ValueError", "the value is too long for one message"]}).encode()
        self._write(struct.pack("<I", len(data)) + data)

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.outgoing, data) :]
        except BrokenPipeError:
            self._lose("the code under test has ended")

    def _receive(self) -> dict[str, Any] | None:
        """The next message, or None behind the last one."""
        head = self._read(4)
        if len(head) < 4:
            return None
        (length,) = struct.unpack("<I", head)
        if length > LONGEST_MESSAGE:
            self._lose(f"a message of {length} bytes")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError):
            self._lose("a message that is no JSON")
        if not isinstance(message, dict):
            self._lose("a message that is no object")
        return message

    def _lose(self, reason: str) -> NoReturn:
        self.lost = True
        raise ChannelLost(reason)

    def _read(self, length: int) -> bytes:
        parts = []
        while length and (part := os.read(self.incoming, min(length, 2**16))):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


class Remote:
    """An object of the other side.

    It compares with objects of the other side only: compared with data of this side it is different, whatever its own
    `__eq__` would say.
    """

    def __init__(self, channel: Channel, handle: int) -> None:
        self.__dict__.update(_channel=channel, _handle=handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._channel.ask("attribute", self._handle, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self._handle, *arguments, **named)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask("item", self._handle, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._channel.ask("set_item", self._handle, key, value)

    def __len__(self) -> int:
        return int(self._channel.ask("length", self._handle))

    def __bool__(self) -> bool:
        return self._channel.ask("truth", self._handle) is True

    def __str__(self) -> str:
        return str(self._channel.ask("text", self._handle))

    def __iter__(self) -> Any:
        return self._channel.ask("iterate", self._handle)

    def __next__(self) -> Any:
        return self._channel.ask("next", self._handle)

    def __hash__(self) -> int:
        return hash(self._handle)

    def _both(self, operation: str, other: Any) -> Any:
        return self._channel.ask(operation, self._handle, other) if isinstance(other, Remote) else NotImplemented

    def __eq__(self, other: object) -> Any:
        return self._both("equal", other)

    def __lt__(self, other: Any) -> Any:
        return self._both("less", other)

    def __le__(self, other: Any) -> Any:
        return self._both("less_equal", other)

    def __add__(self, other: Any) -> Any:
        return self._both("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._both("subtract", other)

    def __mul__(self, other: Any) -> Any:
        return self._both("multiply", other)


def rebuilt_error(name: str, message: str) -> Exception:
    """Python's own exception of that name, or RemoteError; never one that ends the interpreter."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and its like take more arguments.
            pass
    return RemoteError(f"{name}: {message}")


def printable(error: BaseException) -> str:
    """The first 200 characters of an exception's text, also where making it raises."""
    try:
        return str(error)[:200]
    except Exception:
        return "no text"


def _changeable(value: Any) -> bool:
    return type(value) in (list, dict, set)
