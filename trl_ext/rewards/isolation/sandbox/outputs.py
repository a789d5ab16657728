"""Compare the output of a tested program with the expected text, tokens or JSON value.

Every comparison is linear in the sizes.
"""

import json
import re
from decimal import Decimal
from typing import Any

# Longer numbers compare as text: no test needs them, and arithmetic on them is not linear.
_LONGEST_NUMBER = 400
_NUMBER = re.compile(r"[+-]?(?>[0-9]++(?>(?:\.[0-9]*+)?)|\.[0-9]++)(?>(?:[eE][+-]?[0-9]{1,3})?)")


def lines_of(output: str) -> list[str]:
    """Return the lines of an output without trailing white space and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def wrong_text(output: str, expected: str) -> str:
    """Return how an output differs from the expected text, trailing white space aside; "" if it does not."""
    return _wrong_lines(lines_of(output), lines_of(expected), str.__eq__)


def wrong_tokens(output: str, expected: str, tolerance: float) -> str:
    """Return how an output differs from the expected output, token by token on each line; "" if it does not.

    Empty lines at both ends and white space around tokens do not count. Tokens are equal as text or as numbers: an
    expected number with a point or an exponent allows an error of `tolerance`, absolute or relative; any other number
    must be exact (3.0 is 3).
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
    """Return True within `tolerance` of the expected number, absolute or relative, as in programming contests."""
    return number == expected or abs(number - expected) <= tolerance * max(1.0, abs(expected))


def wrong_result(output: str, accepted: tuple[Any, ...], tolerance: float) -> str:
    """Return the error of the JSON on the last line of an output; "" if it equals an accepted value."""
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
