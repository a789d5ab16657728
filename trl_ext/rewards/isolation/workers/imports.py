"""What rules import while they judge: seen in the worker, and imported in the fork server, so that it happens once."""

import gc
import importlib
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trl_ext.rewards.isolation.workers.wire import line

# The line that says that the row in progress begins to import a module.
IMPORTING = line("importing")
LONGEST_NAMES = 2**15  # characters of a report's names of modules


class ImportWatch:
    """A finder that finds nothing, and tells the server of a row's first import before it begins."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.begin()

    def begin(self) -> None:
        """Note what is loaded before a row."""
        self.told = False
        self.num_before = len(sys.modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called by Python for each module that is not loaded yet; None leaves it to the other finders."""
        if not self.told:
            self.told = True
            self.sock.sendall(IMPORTING)

    def imported(self) -> list[str]:
        """The modules that the row has loaded, in order, as many as fit into a report."""
        names, length = list(sys.modules)[self.num_before :] if self.told else [], 0
        for number, name in enumerate(names):
            length += len(name)
            if length > LONGEST_NAMES:
                return names[:number]
        return names


def import_all(names: Iterable[str]) -> None:
    """Import modules into this process, which forks workers; whatever one of them raises."""
    for name in names:
        with suppress(BaseException):  # The row that needs it then says so.
            importlib.import_module(name)
    freeze()


def freeze() -> None:
    """Keep what is loaded from collections: forks share it as long as none touches it."""
    gc.collect()
    gc.freeze()
