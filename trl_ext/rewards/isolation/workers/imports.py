"""Imports of rules while they judge: found in the worker, repeated in the fork server, so that each happens once."""

import gc
import importlib
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.workers.wire import line

# The line that a worker sends when the row in progress begins to import a module.
IMPORTING = line("importing")
LONGEST_NAMES = 2**15  # characters of a report's names of modules


class ImportWatch:
    """A finder that finds nothing, and reports a row's first import to the server before it begins."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.begin()

    def begin(self) -> None:
        """Record the number of loaded modules before a row."""
        self.told = False
        self.num_before = len(sys.modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Report the first import. Python calls this for each new module; None leaves it to the other finders."""
        if not self.told:
            self.told = True
            self.sock.sendall(IMPORTING)

    def imported(self) -> list[str]:
        """Return the modules that the row has loaded, in order, as many as fit into a report."""
        names, length = list(sys.modules)[self.num_before :] if self.told else [], 0
        for number, name in enumerate(names):
            length += len(name)
            if length > LONGEST_NAMES:
                return names[:number]
        return names


def import_all(names: Iterable[str]) -> None:
    """Import modules into this process, which forks workers; ignore their exceptions."""
    for name in names:
        with suppress(BaseException):  # The row that needs the module reports the error.
            importlib.import_module(name)
    freeze()


def freeze() -> None:
    """Exclude loaded objects from garbage collection, so that forks share their memory."""
    gc.collect()
    gc.freeze()
