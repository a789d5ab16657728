"""Change attributes of an object for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def restored(thing: Any, *names: str) -> Iterator[None]:
    """Restore attributes of the instance after the block; absent attributes are absent again."""
    before = {name: vars(thing).get(name, _MISSING) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(thing, name, value)
            elif name in vars(thing):
                delattr(thing, name)


@contextmanager
def swapped(thing: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of the instance inside the block, and restore them after it."""
    with restored(thing, *attributes):
        for name, value in attributes.items():
            setattr(thing, name, value)
        yield
