"""A mark that every process of a test's pools carries."""

import time
import uuid

import pytest
from blowups import marked_processes


@pytest.fixture
def mark(monkeypatch):
    """Text in the environment of all processes that the test starts."""
    mark = f"test-{uuid.uuid4()}"
    monkeypatch.setenv("TRL_EXT_TEST_MARK", mark)
    return mark


@pytest.fixture
def none_left(mark):
    """A function that waits until no marked process is left and returns those that are after half a minute.

    On a busy machine a process that was killed takes a while to go; one that nobody has killed stays for longer.
    """

    def left():
        end = time.monotonic() + 30
        while (found := marked_processes(mark)) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    return left
