"""Limits of the workers: per row, per call, and their number."""

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trl_ext.errors import ConfigError

# Factor of time, and address space, for a row that failed during the import of a library.
PATIENCE, PATIENT_MIB = 20, 32 * 1024
WALL_PER_CPU = 5  # wall-clock seconds of a row per processor second that it may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the worker pool; a row that reaches a limit is stopped and gets the rule's floor.

    Processor time is the main limit, so that a loaded machine does not change verdicts; it counts from the row's start
    in the worker. The wall clock only stops rows that sleep: time in which a row waits for a processor does not count.

    Args:
        cpu_s: Processor seconds a row may use, all its threads together.
        wall_s: Seconds a row may run or sleep. None: five times `cpu_s`.
        memory_mib: MiB of address space by which a row may grow its worker; up to this much memory per worker.
        batch_s: Seconds from a call's start until it is given up. Keep it below a quarter of the process group's
            timeout, because the other ranks wait.
        workers: Worker processes. None: this process's share of the machine's processors, less one for the trainer.
        chunk: Rows that a worker gets at once, fewer at the end of a call.
        max_infra_frac: Share of a rule's rows (0 to 1) that the machine or a server may fail before the run ends.
    """

    cpu_s: float = 2.0
    wall_s: float | None = None
    memory_mib: int = 1024
    batch_s: float = 60.0
    workers: int | None = None
    chunk: int = 16
    max_infra_frac: float = 0.05

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.name in ("wall_s", "workers"):
                continue
            whole = item.name in ("memory_mib", "workers", "chunk")
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{item.name} is {value!r}. Give a {'whole ' if whole else ''}number above 0.")
        if self.max_infra_frac > 1:
            raise ConfigError(f"max_infra_frac is {self.max_infra_frac}. Give a share of rows between 0 and 1.")
        if self.row_wall_s < self.cpu_s:
            raise ConfigError(f"wall_s is {self.wall_s}, below cpu_s {self.cpu_s}. Raise it, or leave it out.")

    @property
    def row_wall_s(self) -> float:
        """Seconds that a row may run or sleep."""
        return WALL_PER_CPU * self.cpu_s if self.wall_s is None else self.wall_s

    @property
    def patient(self) -> "Limits":
        """Limits of the retry of a row that failed during an import."""
        mib = max(self.memory_mib, PATIENT_MIB)
        return replace(self, cpu_s=PATIENCE * self.cpu_s, wall_s=PATIENCE * self.row_wall_s, memory_mib=mib)

    @property
    def num_workers(self) -> int:
        """Worker processes of this process's pool, at least 1."""
        return default_workers() if self.workers is None else self.workers


def default_workers() -> int:
    """Return this process's share of the processors, less one for the trainer, at least 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    local_world_size = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    return max(1, available_cpus() // local_world_size - 1)


def available_cpus() -> int:
    """Return the number of processors of this process: its affinity, limited by the container's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, quota_cpus() or cpus)


def quota_cpus(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return a container's quota in processors, at least 1; None without a quota. Cgroup v2: "400000 100000" is 4."""
    try:
        quota, period = path.read_text().split()[:2]
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # No cgroup v2, or no quota.
        return None
