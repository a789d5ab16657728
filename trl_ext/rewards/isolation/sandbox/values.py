"""Values between two interpreters as JSON: plain data by value, everything else by a numbered handle.

Plain data arrives as the receiver's own exact types, whatever class it had at the sender: an object with an `__eq__`
of its own cannot cross. JSON's own values stand for themselves; anything else is a list of a tag and its content.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MOST_EXACT = 2**63  # Larger whole numbers travel as hexadecimal text, which has no limit of digits.


def encode(value: Any, export: Callable[[Any], Any]) -> Any:
    """A JSON value. `export` gives the content of a handle for what is no plain data."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_MOST_EXACT < value < _MOST_EXACT else ["int", hex(value)]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], [[encode(key, export), encode(item, export)] for key, item in value.items()]]
    if kind in _SEQUENCES or isinstance(value, tuple):
        tag = _SEQUENCES.get(kind, "tuple")  # A named tuple arrives as a plain one.
        return [tag, [encode(item, export) for item in value]]
    if kind in _AS_TEXT:
        return [_AS_TEXT[kind], str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is range:
        return ["range", [hex(bound) for bound in (value.start, value.stop, value.step)]]
    return export(value)


def decode(data: Any, bring: Callable[[list[Any]], Any]) -> Any:
    """The value that `encode` wrote, of exact built-in types; ValueError or TypeError for anything else.

    Args:
        data: What JSON gave.
        bring: Makes the stand-in for a handle from its tag and content.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object where a value is due")
        return data
    tag, content = data
    if tag in ("dict", "counter"):
        pairs = {decode(key, bring): decode(item, bring) for key, item in content}
        return Counter(pairs) if tag == "counter" else pairs
    if tag in _BUILD_MANY:
        return _BUILD_MANY[tag](decode(item, bring) for item in content)
    if tag in _BUILD:
        return _BUILD[tag](content)
    return bring(data)


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "dict", defaultdict: "dict", Counter: "counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_BUILD_MANY: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_AS_TEXT: dict[type, str] = {Fraction: "fraction", Decimal: "decimal"}
_BUILD: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "fraction": Fraction,
    "decimal": Decimal,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda bounds: range(*[int(bound, 16) for bound in bounds]),
}
