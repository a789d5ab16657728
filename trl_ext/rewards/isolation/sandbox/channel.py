"""Remote calls between two interpreters: the tests' process calls the candidate's functions, and the reverse.

Plain data is copied as JSON and becomes the receiver's exact built-in types. An object with a special `__eq__` is
never copied, so it takes no part in a comparison with an expected value. JSON's values are sent unchanged; other data
is a list of a tag and its content. All other objects stay in their process; the other process uses a `RemoteObject`.
A text or number of a class that the program defines, such as a member of an IntEnum, is copied, and its other
attributes are read remotely.

A list, dict or set that is an attribute or item of the candidate's object is kept equal in both processes: each
message carries the contents of the containers that changed.

The tests' process only answers calls of functions that it passed as arguments: an attribute of such a function would
lead to the expected values.
"""

import builtins
import json
import operator
import os
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import chain
from types import CoroutineType
from typing import Any, NoReturn

LONGEST_MESSAGE = 4 * 2**20  # bytes
_MOST_SHARED = 4096  # characters of JSON in all containers kept equal; each message compares them


@cache
def _runner() -> Any:
    """Return the event loop of all coroutines of a candidate: what they wait for belongs to one loop."""
    import asyncio  # Slow to import.

    return asyncio.Runner()


# The operations on a remote object, by name. None takes an expected value to compare with.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "attribute": getattr,
    "set_attribute": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "text": str,
    "represent": repr,
    "instance": lambda kind, thing: isinstance(thing, kind),
    "await": lambda coroutine: _runner().run(coroutine),
    "enter": lambda thing: type(thing).__enter__(thing),
    "leave": lambda thing: type(thing).__exit__(thing, None, None, None),
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "equal": operator.eq,
    "less": operator.lt,
    "less_equal": operator.le,
}
CALLS_ONLY = frozenset({"call"})
ALL_OPERATIONS = frozenset(_OPERATIONS)

_MOST_EXACT = 2**63  # Larger whole numbers travel as hexadecimal text, which has no limit of digits.
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "dict", defaultdict: "dict", Counter: "counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_BUILD_MANY: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_AS_TEXT: dict[type, str] = {Fraction: "fraction", Decimal: "decimal"}
_AS_TEXT |= {date: "date", datetime: "datetime", time: "time"}  # A time zone arrives as its offset.
# Base classes of named or extended values, and the function that returns the plain value.
_BARE: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
# An object of a class that defines one of these is more than a value.
_OWN = frozenset("__eq__ __lt__ __le__ __add__ __sub__ __mul__ __len__ __iter__ __getitem__".split())
_CHANGEABLE = (list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter)
_TYPES = {name: thing for name, thing in vars(builtins).items() if isinstance(thing, type)}
_BUILD: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "fraction": Fraction,
    "decimal": Decimal,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "typed": lambda parts: array(*parts),
    "type": lambda name: _TYPES[name],
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda bounds: range(*[int(bound, 16) for bound in bounds]),
}


class RemoteError(Exception):
    """An exception of the other process whose class is not built into Python."""


class ChannelLost(BaseException):
    """The other process has ended or sent junk. Not an Exception, so that no test that expects one catches it."""


class Channel:
    """One end of the connection.

    Args:
        incoming, outgoing: Descriptors.
        allowed: Operations that the other process may request.
        names: Objects that the other process may look up by name.
    """

    def __init__(self, incoming: int, outgoing: int, allowed: frozenset[str], names: Mapping[str, Any]) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.allowed, self.names = allowed, names
        self.held: list[Any] = []
        self.handles: dict[int, int] = {}  # `id` of a held object: its handle
        self.shared: dict[int, tuple[Any, Any, int]] = {}  # handle: container, its JSON in both processes, length
        self.lost = False  # Stays True if a bare `except:` swallows ChannelLost.

    def ask(self, operation: str, subject: Any, *arguments: Any, **named: Any) -> Any:
        """Run an operation in the other process and raise its exception. It may change argument lists, dicts, sets."""
        request = {"do": operation, "on": subject, "with": self._pack(arguments), "named": self._pack(named)}
        self._send(request | {"changed": self._changes()})
        while True:
            message = self._receive() or self._lose("the code under test has ended")
            self._take(message.get("changed"))
            if "do" in message:
                self._send(self._answer(message))
            elif "raised" in message:
                raise rebuilt_error(*message["raised"])
            else:
                for argument, packed in zip(arguments, message.get("after") or (), strict=False):
                    if packed is not None and _changeable(argument):
                        _replace(argument, self._unpack(packed))
                return self._unpack(message["value"])

    def look_up(self, name: str) -> Any:
        """Return an object of the other process by its name; AttributeError if there is none."""
        return self.ask("name", name)

    def serve(self) -> None:
        """Answer requests until the other process ends."""
        while (message := self._receive()) is not None:
            self._send(self._answer(message))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._take(request.get("changed"))
            answer = self._outcome(request)
        except Exception as error:  # An exception is an answer, as a value is.
            answer = {"raised": [type(error).__name__, printable(error)]}
        return answer | {"changed": self._changes()}

    def _pack_changeable(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the contents of each argument that an operation may change; None for other arguments."""
        return [self._pack(argument) if _changeable(argument) else None for argument in arguments]

    def _outcome(self, request: dict[str, Any]) -> dict[str, Any]:
        operation, subject = request["do"], request["on"]
        if operation == "name":
            if subject not in self.names:
                raise AttributeError(subject)
            return {"value": self._pack(self.names[subject])}
        if operation not in self.allowed:
            raise ValueError(f"{operation!r} is not answered here")
        arguments, named = self._unpack(request["with"]), self._unpack(request["named"])
        before = self._pack_changeable(arguments)
        value = _OPERATIONS[operation](self._find(subject), *arguments, **named)
        after = self._pack_changeable(arguments)
        if operation in ("attribute", "item") and _changeable(value):
            tagged = self._export(value)
            packed = ["shared", [tagged, self._share(tagged[1], value)]]
        else:
            packed = self._pack(value)
        return {"value": packed, "after": after if after != before else None}

    def _find(self, handle: Any) -> Any:
        if not isinstance(handle, int) or not 0 <= handle < len(self.held):
            raise ValueError(f"there is no object {handle!r} here")
        return self.held[handle]

    def _share(self, handle: int, container: Any) -> Any:
        """Keep a container equal from now on unless it is long, drop the oldest ones if needed; return its JSON."""
        self.shared.pop(handle, None)
        packed = self._pack(container)
        if (length := len(json.dumps(packed))) <= _MOST_SHARED:
            self.shared[handle] = container, packed, length
        while sum(length for _, _, length in self.shared.values()) > _MOST_SHARED:
            del self.shared[next(iter(self.shared))]
        return packed

    def _changes(self) -> list[Any]:
        """Return handles and contents of the containers that have changed here since the last message."""
        changed = [(handle, one) for handle, (one, known, _) in self.shared.items() if self._pack(one) != known]
        return [[handle, self._share(handle, container)] for handle, container in changed]

    def _take(self, changes: Any) -> None:
        for handle, packed in changes or ():
            if handle in self.shared:
                container = self.shared[handle][0]
                _replace(container, self._unpack(packed))
                self._share(handle, container)

    def _pack(self, value: Any) -> Any:
        return encode(value, self._export)

    def _export(self, thing: Any) -> list[Any]:
        if isinstance(thing, _Remote) and thing._channel is self:
            return ["yours", thing._handle]
        if id(thing) not in self.handles:
            self.handles[id(thing)] = len(self.held)
            self.held.append(thing)
        return ["mine", self.handles[id(thing)]]

    def _unpack(self, data: Any) -> Any:
        return decode(data, self._bring)

    def _bring(self, tagged: list[Any]) -> Any:
        owner, content = tagged
        if owner == "yours":
            return self._find(content)
        if owner == "shared":
            (_, handle), packed = content
            container = self._unpack(packed)
            if handle in self.shared:
                container = _replace(self.shared[handle][0], container)
            self._share(handle, container)
            return container
        if owner != "mine" or not isinstance(content, int):
            raise ValueError(f"{owner!r} is no tag of a value")
        return RemoteObject(self, content)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > LONGEST_MESSAGE:
            if "do" in message:
                raise ValueError(f"{len(data)} bytes are too long for one message")
            data = json.dumps({"raised": ["ValueError", "the value is too long for one message"]}).encode()
        data = struct.pack("<I", len(data)) + data
        try:
            while data:
                data = data[os.write(self.outgoing, data) :]
        except BrokenPipeError:
            self._lose("the code under test has ended")

    def _receive(self) -> dict[str, Any] | None:
        """Return the next message, or None at the end."""
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


def _asking(operation: str) -> Callable[..., Any]:
    """Return a method that runs the operation in the other process."""

    def method(self: "RemoteObject", *arguments: Any, **named: Any) -> Any:
        return self._channel.ask(operation, self._handle, *arguments, **named)

    return method


def _asking_of_two(operation: str) -> Callable[..., Any]:
    """Return a method for an operator whose second operand must be remote, too."""

    def method(self: "RemoteObject", other: Any) -> Any:
        return self._channel.ask(operation, self._handle, other) if isinstance(other, RemoteObject) else NotImplemented

    return method


class _Remote:
    """An object that the other process holds."""

    _channel: Channel
    _handle: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._channel.ask("attribute", self._handle, name)


# Classes of the texts and numbers whose class only exists in the other process.
_VALUES: dict[type, Any] = {base: type(f"Remote_{base.__name__}", (_Remote, base), {}) for base in _BARE}


class RemoteObject(_Remote):
    """An object of the other process. It never equals data of this process, whatever its `__eq__` would return."""

    def __init__(self, channel: Channel, handle: int) -> None:
        self.__dict__.update(_channel=channel, _handle=handle)

    def __len__(self) -> int:
        return int(self._channel.ask("length", self._handle))

    def __bool__(self) -> bool:
        return self._channel.ask("truth", self._handle) is True

    def __str__(self) -> str:
        return str(self._channel.ask("text", self._handle))

    def __repr__(self) -> str:
        return str(self._channel.ask("represent", self._handle))

    def __hash__(self) -> int:
        return hash(self._handle)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, _Remote) and self._channel.ask("instance", self._handle, thing) is True

    def __enter__(self) -> Any:
        return self._channel.ask("enter", self._handle)

    def __exit__(self, *_: Any) -> None:
        self._channel.ask("leave", self._handle)  # It must not swallow an exception of the tests.

    __call__, __iter__, __next__ = _asking("call"), _asking("iterate"), _asking("next")
    __getitem__, __setitem__, __delitem__ = _asking("item"), _asking("set_item"), _asking("delete_item")
    __setattr__ = _asking("set_attribute")
    __eq__, __lt__, __le__ = _asking_of_two("equal"), _asking_of_two("less"), _asking_of_two("less_equal")
    __add__, __sub__, __mul__ = _asking_of_two("add"), _asking_of_two("subtract"), _asking_of_two("multiply")


def rebuilt_error(name: str, message: str) -> Exception:
    """Return the built-in exception of that name, or a RemoteError; never an exception that ends the interpreter."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and others take more arguments.
            pass
    return RemoteError(f"{name}: {message}")


def printable(error: BaseException) -> str:
    """Return the first 200 characters of an exception's text; "no text" if its `__str__` raises."""
    try:
        return str(error)[:200]
    except Exception:
        return "no text"


def _changeable(value: Any) -> bool:
    return type(value) in _CHANGEABLE


def _replace(container: Any, value: Any) -> Any:
    """Give a container the contents of `value`, which has its type; return the container."""
    if isinstance(container, type(value)):
        container.clear()
        (container.update if hasattr(container, "update") else container.extend)(value)
    return container


async def _await(thing: Any) -> Any:
    return thing._channel.ask("await", thing._handle)


def encode(value: Any, export: Callable[[Any], Any]) -> Any:
    """Return a JSON value. `export` returns the content of a handle for an object that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if isinstance(value, _Remote):
        return export(value)
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], [[encode(key, export), encode(item, export)] for key, item in value.items()]]
    if kind in _SEQUENCES or isinstance(value, tuple):
        tag = _SEQUENCES.get(kind, "tuple")  # A named tuple becomes a tuple.
        return [tag, [encode(item, export) for item in value]]
    if kind in _WITHOUT_ITEMS:
        return _WITHOUT_ITEMS[kind](value)
    return _encode_object(value, kind, export)


def _encode_object(value: Any, kind: type, export: Callable[[Any], Any]) -> Any:
    """Return an array, a built-in class, a coroutine, or a value of a program's class as JSON; else a handle."""
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), export)
        return ["array", [value.dtype.str, plain]] if kind.__name__ == "ndarray" else plain
    if kind is type and value in _TYPES.values():
        return ["type", value.__name__]
    if kind is CoroutineType:
        return ["coroutine", export(value)]
    for base, bare in _BARE.items():
        if _is_value(value, base):
            return ["value", [export(value), encode(bare(value), export)]]
    return export(value)


# Data without items, by exact type. `_BUILD` has the way back of each tag.
_WITHOUT_ITEMS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if -_MOST_EXACT < value < _MOST_EXACT else ["int", hex(value)],
    bytes: lambda value: ["bytes", value.hex()],
    bytearray: lambda value: ["bytearray", value.hex()],
    complex: lambda value: ["complex", [value.real, value.imag]],
    timedelta: lambda value: ["timedelta", [value.days, value.seconds, value.microseconds]],
    array: lambda value: ["typed", [value.typecode, value.tolist()]],
    range: lambda value: ["range", [hex(bound) for bound in (value.start, value.stop, value.step)]],
    **dict.fromkeys(_AS_TEXT, lambda value: [_AS_TEXT[type(value)], str(value)]),
}


def _is_value(value: Any, base: type) -> bool:
    """Return True for a text or number of a class derived from `base` which defines no operation of `_OWN`."""
    if not isinstance(value, base):
        return False
    order = type(value).__mro__
    return not _OWN & {*chain(*map(vars, order[: order.index(base)]))}


def decode(data: Any, bring: Callable[[list[Any]], Any]) -> Any:
    """Return the value that `encode` wrote, in exact built-in types; raises an Exception for anything else.

    `bring` returns the object for a handle from its tag and content.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object where a value is due")
        return data
    tag, content = data
    if tag in ("dict", "counter"):
        pairs = {decode(key, bring): decode(item, bring) for key, item in content}
        return Counter(pairs) if tag == "counter" else pairs
    if tag == "array":
        return sys.modules["numpy"].array(decode(content[1], bring), content[0])
    if tag in _BUILD_MANY:
        return _BUILD_MANY[tag](decode(item, bring) for item in content)
    if tag in _BUILD:
        return _BUILD[tag](content)
    if tag == "coroutine":
        return _await(bring(content))
    if tag == "value":
        thing, bare = bring(content[0]), decode(content[1], bring)
        value = _VALUES[type(bare)](bare)
        value.__dict__.update(_channel=thing._channel, _handle=thing._handle)
        return value
    return bring(data)
