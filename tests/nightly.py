"""Which cases of a table `make test` runs, and which wait for `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """One case, of one argument or of several, that `make nightly` alone runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def daily(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values as cases of one argument; `make test` runs the chosen ones alone."""
    return [value if value in chosen else nightly(value) for value in values]
