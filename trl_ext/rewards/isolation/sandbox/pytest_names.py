"""Stand-in for pytest, which is not in the sandbox: the functions that tests use."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

__all__ = ["approx", "raises"]


@contextmanager
def raises(expected: Any, match: str = "") -> Iterator[SimpleNamespace]:
    """Fail unless the block raises an expected exception with the pattern in its text."""
    info = SimpleNamespace(value=None)
    try:
        yield info
    except expected as error:
        info.value = error
    assert info.value is not None and re.search(match, str(info.value)), f"{match!r} was not raised"


class approx:
    """A number, or a list or tuple of numbers, equal to every close value."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.near = expected, {"rel_tol": rel, "abs_tol": abs}

    def __eq__(self, got: Any) -> bool:
        wanted, got = (value if isinstance(value, list | tuple) else [value] for value in (self.expected, got))
        return len(wanted) == len(got) and all(
            math.isclose(a, b, **self.near) for a, b in zip(wanted, got, strict=True)
        )
