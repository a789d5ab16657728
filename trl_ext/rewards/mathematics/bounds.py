"""Sizes above which an answer is not judged, and the two errors of reading an answer.

All bounds are sizes, not times, so that slow and fast machines give the same verdict.
"""

MAX_CHARS = 2_000  # of an extracted answer
MAX_GOLD_CHARS = 8_000
MAX_TOKENS = 600  # of an extracted answer
MAX_GOLD_TOKENS = 2_000
MAX_NESTING = 64  # brackets inside brackets
MAX_DIGITS = 2_000  # decimal digits of any number in an answer or its value
MAX_PARTS = 32  # of a list, a set or a union
MAX_MATRIX = 8  # rows and columns


class TooComplex(Exception):
    """A text would take too long to judge; the message names the part that is too large."""


class Unreadable(Exception):
    """A text is not an expression that this package reads; the message gives the reason."""
