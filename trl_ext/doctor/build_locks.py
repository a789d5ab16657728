"""Locks in the folder where torch compiles helpers, such as DeepSpeed's CPU Adam.

A build makes a file `lock` in the helper's folder, keeps it open, and removes it at the end. A killed build leaves the
file, and later processes that need the helper silently wait forever.
"""

import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trl_ext.compat.versions import extensions_folder
from trl_ext.doctor.finding import Finding, note, ok

# No build takes this long. A younger lock may belong to another machine or container that shares the folder.
STALE_AGE_S = 600.0


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock in a helper's folder, its age, and a local process that has it open.

    `builder` is None if there is none that this user may inspect.
    """

    path: str
    age_s: float
    builder: int | None = None

    @property
    def is_stale(self) -> bool:
        """True if no local process has it open and it is too old for a build elsewhere."""
        return self.builder is None and self.age_s >= STALE_AGE_S

    @property
    def finding(self) -> Finding:
        """The lock as a finding, with the command that removes it."""
        helper, remedy = Path(self.path).parent.name, f"rm {shlex.quote(self.path)}"
        if self.builder is not None:
            return ok("compiler", f"Process {self.builder} is compiling the helper '{helper}' and holds {self.path}.")
        units = ((86_400, "days"), (3_600, "hours"), (60, "minutes"))
        each_s, unit = next((one for one in units if self.age_s >= 2 * one[0]), (1, "s"))
        age = f"{self.age_s // each_s:.0f} {unit}"
        seen = f"{self.path} is {age} old, and no process that can be seen here has it open"
        if self.is_stale:
            what = f"{seen}: a killed build left it, and a run that needs the helper '{helper}' waits for it for ever."
            return note("compiler", what, f"Remove it: {remedy}")
        what = f"{seen}: another machine or container is compiling the helper '{helper}', or a build was killed."
        return note("compiler", what, f"If no other machine compiles in that folder, remove it: {remedy}")


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


def lock_warnings() -> list[str]:
    """Return a sentence with its remedy for each lock that no local process holds."""
    findings = [lock.finding for lock in build_locks() if lock.builder is None]
    return [f"{finding.what} {finding.advice}" for finding in findings]


@cache
def warn_once() -> None:
    """Print once, in one process of a machine, if DeepSpeed would wait for a lock of a killed build."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for sentence in lock_warnings():
            print(f"\nwarning: {sentence}\n", file=sys.stderr, flush=True)


def _holder(status: os.stat_result) -> int | None:
    """Return a process that has the file open, among those that this user may inspect; None if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for entry in os.scandir(process / "fd"):
                with suppress(FileNotFoundError):  # closed since, or no file
                    if os.path.samestat(entry.stat(), status):
                        return int(process.name)
    return None
