"""Collect facts of this machine: driver, packages, PyTorch in a separate process, memory, disks, variables."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from trl_ext.doctor import installed
from trl_ext.doctor.build_locks import build_locks
from trl_ext.doctor.examine import WATCHED
from trl_ext.doctor.facts import Disk, Facts, Kernels
from trl_ext.doctor.nvml import hardware_of, read_cards
from trl_ext.memory.cards import Hardware
from trl_ext.memory.units import gib

PROBE_S = 60.0  # a first import of PyTorch from a slow disk takes half of it
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def look(output_dir: str = ".", probe_s: float = PROBE_S) -> Facts:
    """Return the facts of this machine; missing parts are left empty.

    Args:
        output_dir: Folder that the run will write to.
        probe_s: Seconds to wait for PyTorch; 0 does not start it.
    """
    command = [sys.executable, "-m", "trl_ext.doctor.probe"]
    probe = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) if probe_s else None
    total, free = host_memory()
    facts: dict[str, Any] = {
        "versions": installed.versions(),
        "untested": installed.untested_findings(),
        "vllm_window": installed.vllm_window(),
        "compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "ninja": shutil.which("ninja"),
        "build_locks": build_locks(),
        "host_total_gib": total,
        "host_free_gib": free,
        "disks": _disks(output_dir),
        "environment": {name: os.environ[name] for name in WATCHED if name in os.environ},
    }
    if probe is not None:
        try:
            out, err = probe.communicate(timeout=probe_s)
            facts["kernels"], facts["no_kernels"] = read_answer(out, err, probe.returncode)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.communicate()
            facts["no_kernels"] = f"it did not answer within {probe_s:.0f} s"
    return replace(look_at_cards(), **facts)


def look_at_cards() -> Facts:
    """Return the facts about cards only, read in a few milliseconds."""
    try:
        import pynvml
    except ImportError:
        why = "the package that reads the driver is missing: pip install nvidia-ml-py"
        return Facts(no_gpus=why if shutil.which("nvidia-smi") else "there is no NVIDIA driver")
    return read_cards(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))


def this_machine() -> Hardware | None:
    """Return this machine's cards and host memory for the planner; None without cards."""
    cards = look_at_cards()
    if not cards.gpus:
        return None
    return hardware_of(cards.gpus, cards.has_nvlink, cards.has_peer_access, host_memory()[1])


def read_answer(out: str, err: str, code: int) -> tuple[Kernels | None, str]:
    """Parse the probe's output; None and the last line of its errors if it printed no answer."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code or not lines:
        last = (err.strip().splitlines() or [f"exit code {code}"])[-1]
        return None, last
    return Kernels(**json.loads(lines[-1])), ""


def host_memory() -> tuple[float | None, float | None]:
    """Return total and available GiB of this machine, or of the container if it has less; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    limit = _number(_CGROUP_LIMITS)
    if limit and limit < total:
        total, free = limit, min(free, limit - (_number(_CGROUP_USED) or 0))
    return round(gib(total), 1), round(gib(free), 1)


def _number(files: tuple[str, ...]) -> int | None:
    """Return the number in the first of these files that exists; None for "max"."""
    for file in files:
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _disks(output_dir: str) -> tuple[Disk, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"output": output_dir, "model cache": HF_HUB_CACHE, "shared memory": "/dev/shm"}
    found = []
    for purpose, path in places.items():
        place = Path(path).expanduser().absolute()  # or the nearest folder above it that exists
        there = next((folder for folder in (place, *place.parents) if folder.exists()), None)
        if there is not None and (purpose != "shared memory" or there == place):
            free_gib = round(gib(shutil.disk_usage(there).free), 1)
            found.append(Disk(purpose, str(place), free_gib, os.access(there, os.W_OK)))
    return tuple(found)
