"""Compare what a program gave with what a test expects: printed text, or a value that came as JSON.

Both sides are bounded in size by the caller; every comparison is linear in them.
"""

import json
import re
from decimal import Decimal
from typing import Any

# Longer ones compare as text: no test needs them, and arithmetic on them is not linear.
_LONGEST_NUMBER = 400
_NUMBER = re.compile(r"[+-]?(?>[0-9]++(?>(?:\.[0-9]*+)?)|\.[0-9]++)(?>(?:[eE][+-]?[0-9]{1,3})?)")


def lines_of(output: str) -> list[str]:
    """The lines of an output without their trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def wrong_text(output: str, expected: str) -> str:
    """Say how an output differs from the expected text, trailing white space aside; "" where it does not."""
    return _wrong_lines(lines_of(output), lines_of(expected), str.__eq__)


def wrong_tokens(output: str, expected: str, tolerance: float) -> str:
    """Say how an output differs from the expected one, token by token on each line; "" where it does not.

    Empty lines at both ends and white space around tokens do not count. Tokens are equal as text or as numbers: a
    number that is expected with a point or an exponent allows for an error of `tolerance`, absolute or relative,
    any other must be met exactly (3.0 meets 3).
    """

    def same(line: str, wanted: str) -> bool:
        if line == wanted:
            return True
        tokens, due = line.split(), wanted.split()
        if len(tokens) != len(due):
            return False
        return all(a == b or same_number(a, b) for a, b in zip(tokens, due, strict=True))

    def same_number(token: str, expected: str) -> bool:
        if max(len(token), len(expected)) > _LONGEST_NUMBER:
            return False
        if not _NUMBER.fullmatch(token) or not _NUMBER.fullmatch(expected):
            return False
        if expected.lstrip("+-").isdigit():
            return Decimal(token) == Decimal(expected)
        return _close(float(token), float(expected), tolerance)

    return _wrong_lines(output.strip().split("\n"), expected.strip().split("\n"), same)


def _wrong_lines(lines: list[str], due: list[str], same: Any) -> str:
    if len(lines) != len(due):
        return f"{len(lines)} lines, expected {len(due)}"
    return "" if all(map(same, lines, due)) else "wrong output"


def _close(number: float, expected: float, tolerance: float) -> bool:
    """True within `tolerance` of the expected number, absolute or relative, as judges of contests have it."""
    return number == expected or abs(number - expected) <= tolerance * max(1.0, abs(expected))


def wrong_result(output: str, accepted: tuple[Any, ...], tolerance: float) -> str:
    """Say what is wrong with the JSON on the last line of an output; "" where it equals an accepted value."""
    last = output.rstrip().rpartition("\n")[2]
    try:
        got = json.loads(last)
        right = any(_same_value(got, value, tolerance) for value in accepted)
    except (ValueError, RecursionError, OverflowError):
        return "no result"
    return "" if right else "wrong result"


def _same_value(got: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return False
        return all(_same_value(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return False
        return all(_same_value(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, float) and isinstance(got, int | float) and not isinstance(got, bool):
        return _close(got, expected, tolerance)
    return bool(got == expected)
