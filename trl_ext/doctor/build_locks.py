"""Locks in the folder where torch compiles helpers, such as DeepSpeed's CPU Adam.

A build makes a file `lock` in the helper's folder, keeps it open, and removes it at the end. A killed build leaves the
file, and torch lets later processes that need the helper wait for ever, in silence; our runs end with a sentence.
"""

import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from trl_ext.compat.versions import extensions_folder
from trl_ext.doctor.finding import Finding, note, ok
from trl_ext.errors import ConfigError

LONGEST_BUILD_S = 600.0  # a helper takes a minute or two


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock in a helper's folder, its age, and a local process that has it open.

    `builder` is None if there is none that this user may inspect.
    """

    path: str
    age_s: float
    builder: int | None = None

    @property
    def finding(self) -> Finding:
        """The lock as a finding, with the command that removes it."""
        helper = Path(self.path).parent.name
        if self.builder is not None:
            return ok("compiler", f"Process {self.builder} is compiling the helper '{helper}' and holds {self.path}.")
        what = (
            f"{self.path} is {timedelta(seconds=round(self.age_s))} old, and no process that can be seen here has it "
            f"open: a killed build left it, and a run that needs the helper '{helper}' waits for it."
        )
        remedy = f"rm {shlex.quote(self.path)}"
        return note("compiler", what, f"If no other machine or container compiles in that folder, remove it: {remedy}")


def build_locks() -> tuple[BuildLock, ...]:
    """Return all locks of torch's helpers: in TORCH_EXTENSIONS_DIR, else in this Python's folders of the cache."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    files = extensions_folder().glob("*/lock" if os.environ.get("TORCH_EXTENSIONS_DIR") else f"{python}_*/*/lock")
    found = []
    for file in sorted(files):
        with suppress(FileNotFoundError):  # its build ended while we looked
            status = file.stat()
            found.append(BuildLock(str(file), max(time.time() - status.st_mtime, 0.0), _holder(status)))
    return tuple(found)


def wait_for_build(baton: Any) -> None:
    """Wait until a lock is removed, as `FileBaton.wait` of torch does; `baton` is the lock's FileBaton.

    Raises ConfigError if the lock is older than a build takes, and no process that can be seen here has it open.
    """
    while os.path.exists(path := baton.lock_file_path):
        with suppress(FileNotFoundError):
            status = os.stat(path)
            age_s = time.time() - status.st_mtime
            if age_s > LONGEST_BUILD_S and _holder(status) is None:
                finding = BuildLock(path, age_s).finding
                raise ConfigError(f"{finding.what} {finding.advice}")
        time.sleep(baton.wait_seconds)


@cache
def warn_once() -> None:
    """Bound this process's waits for locks; print, in one process of a machine, each lock of a killed build."""
    from torch.utils.file_baton import FileBaton

    FileBaton.wait = wait_for_build  # type: ignore[assignment,method-assign]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for lock in build_locks():
            if lock.builder is None:
                print(f"\nwarning: {lock.finding.what} {lock.finding.advice}\n", file=sys.stderr, flush=True)


def _holder(status: os.stat_result) -> int | None:
    """Return a process that has the file open, among those that this user may inspect; None if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for entry in os.scandir(process / "fd"):
                with suppress(FileNotFoundError):  # closed since, or no file
                    if os.path.samestat(entry.stat(), status):
                        return int(process.name)
    return None
