"""Collect facts of this machine: driver, packages, PyTorch in a separate process, memory, disks, variables.

Cards are read from NVIDIA's management library (nvidia-ml-py, imported as pynvml), without starting CUDA.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from trl_ext.doctor import installed
from trl_ext.doctor.build_locks import build_locks
from trl_ext.doctor.examine import WATCHED
from trl_ext.doctor.facts import BY_SPEED, Disk, Facts, Gpu, Kernels
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import NVLINK3, PCIE4, PCIE4_NO_P2P, Card, Hardware, find_card
from trl_ext.memory.units import gib

PROBE_S = 60.0  # a first import of PyTorch from a slow disk takes half of it
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_CGROUP_STATS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")


def look(output_dir: str = ".", probe_s: float = PROBE_S) -> Facts:
    """Return the facts of this machine; missing parts are left empty.

    Args:
        output_dir: Folder that the run will write to.
        probe_s: Seconds to wait for PyTorch; 0 does not start it.
    """
    command = [sys.executable, "-m", "trl_ext.doctor.probe"]
    probe = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) if probe_s else None
    host = host_memory()
    facts: dict[str, Any] = {
        "versions": installed.versions(),
        "untested": installed.untested_findings(),
        "vllm_window": installed.window_of("vllm", user="trl"),
        "vllms_transformers": installed.window_of("transformers", user="vllm"),
        "compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "ninja": shutil.which("ninja"),
        "build_locks": build_locks(),
        "host_total_gib": host.total_gib,
        "host_free_gib": host.free_gib,
        "disks": _disks(output_dir),
        "sandbox": look_at_sandbox(),
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
    return read_cards(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))


def this_machine() -> Hardware | None:
    """Return this machine's cards and host memory for the planner; None without cards. Raises ConfigError if CUDA may
    show other cards."""
    cards = look_at_cards()
    if not cards.gpus:
        return None
    if cards.counts_by_speed:
        raise ConfigError(" ".join(BY_SPEED))
    return hardware_of(cards.gpus, cards.has_nvlink, cards.has_peer_access, host_memory().free_gib)


def read_answer(out: str, err: str, code: int) -> tuple[Kernels | None, str]:
    """Parse the probe's output; None and the last line of its errors if it printed no answer."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code or not lines:
        last = (err.strip().splitlines() or [f"exit code {code}"])[-1]
        return None, last
    return Kernels(**json.loads(lines[-1])), ""


class HostMemory(NamedTuple):
    """Total and available GiB of a machine; None if unknown."""

    total_gib: float | None = None
    free_gib: float | None = None


def host_memory() -> HostMemory:
    """Return the memory of this machine, or of the container if it has less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return HostMemory()
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    limit = _number(_CGROUP_LIMITS, total)
    if limit < total:
        used = max(_number(_CGROUP_USED, 0) - _page_cache_bytes(), 0)
        total, free = limit, min(free, limit - used)
    return HostMemory(round(gib(total), 1), round(gib(free), 1))


def _page_cache_bytes() -> int:
    """Return bytes of files that the container holds in memory; the kernel drops them when memory is short."""
    numbers: dict[str, str] = dict(re.findall(r"(\w+) (\d+)", _text_of(_CGROUP_STATS)))
    # Version 1 has both names, and only total_ counts the groups below.
    return sum(int(numbers.get(f"total_{name}", numbers.get(name, 0))) for name in ("active_file", "inactive_file"))


def _number(files: tuple[str, ...], otherwise: int) -> int:
    """Return the number in the first of these files that exists; `otherwise` for "max", or if none exists."""
    text = _text_of(files)
    return int(text) if text.isdigit() else otherwise


def _text_of(files: tuple[str, ...]) -> str:
    """Return the text of the first of these files that exists; "" if none does."""
    for file in files:
        try:
            return Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return ""


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


def look_at_sandbox() -> tuple[int, str]:
    """Return the level of the rule `code`'s sandbox, -1 if it does not start, and why the next level fails."""
    from trl_ext.rewards.isolation.sandbox import api

    try:
        return api.sandbox_level()
    except api.SandboxTrouble as error:
        return -1, str(error)


# Cards --------------------------------------------------------------------------------------------------------------


def read_cards(nvml: Any, visible: str | None, order: str | None = None) -> Facts:
    """Read all cards that CUDA would show, and the driver; other facts are left empty.

    `nvml` is the module pynvml; `visible` is CUDA_VISIBLE_DEVICES and `order` CUDA_DEVICE_ORDER, None if not set.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Facts(no_gpus=f"the NVIDIA driver does not answer ({error})")
    try:
        return _cards(nvml, visible, order)
    except nvml.NVMLError as error:
        return Facts(no_gpus=f"the NVIDIA driver answers with an error ({error})")
    finally:
        nvml.nvmlShutdown()


def _cards(nvml: Any, visible: str | None, order: str | None) -> Facts:
    handles = every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    parts_of = partial(_parts, nvml)
    if str(visible).startswith("MIG-"):
        handles = [*chain(*map(parts_of, handles))]
    shown = shown_by(visible, [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles])
    handles = [handles[index] for index in shown]
    # Of split cards CUDA shows a single part, the first, and no whole card with it.
    handles = [*chain(*map(parts_of, handles))][:1] or handles
    # The driver counts by PCI bus. For equal cards, or all cards, the order does not matter.
    are_numbers, kinds = bool(re.match(r"\s*\d", str(visible))), set(map(nvml.nvmlDeviceGetName, every))
    counts_by_speed = are_numbers and order != "PCI_BUS_ID" and len(kinds) > 1 and len(shown) < len(every)
    nothing = "the driver has no card"
    if visible is not None:
        nothing = f"CUDA_VISIBLE_DEVICES is '{visible}', which shows none"
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
    return Facts(
        gpus=tuple(_gpu(nvml, handle) for handle in handles),
        no_gpus="" if handles else nothing,
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        has_nvlink=_all_pairs(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK),
        has_peer_access=_all_pairs(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_READ),
        counts_by_speed=counts_by_speed,
    )


def shown_by(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return positions of the cards that CUDA_VISIBLE_DEVICES shows, in its order.

    Like CUDA it stops at the first word that names no card.
    """
    if visible is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for word in map(str.strip, visible.split(",")):
        # At least one character: an empty word names no card.
        found = [at for at, uuid in enumerate(uuids) if word in (str(at), uuid[: max(len(word), 1)])]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
    return shown


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """Return the parts into which MIG splits a card; [] for a whole card, and for a part."""
    count = _or(nvml, partial(nvml.nvmlDeviceGetMaxMigDeviceCount, handle), 0)
    parts = [_or(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, at), None) for at in range(count)]
    return [*filter(None, parts)]  # places may be empty


def _gpu(nvml: Any, handle: Any) -> Gpu:
    """Read a card, or a part of it, which has its own memory and the name of its card."""
    card = _or(nvml, lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    kept = _or(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved, 0)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(card)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(card)),
        total_gib=round(gib(memory.total - kept), 2),
        free_gib=round(gib(memory.free), 2),
        capability=(capability[0], capability[1]),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        is_split=_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(card)[0], 0) == 1,
    )


def _or(nvml: Any, ask: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result, or `otherwise` if this card or driver does not support the query."""
    try:
        return ask()
    except nvml.NVMLError:
        return otherwise


def _all_pairs(nvml: Any, handles: Sequence[Any], capability: int) -> bool | None:
    pairs = list(combinations(handles, 2))
    try:
        answers = [nvml.nvmlDeviceGetP2PStatus(one, other, capability) for one, other in pairs]
    except nvml.NVMLError:
        return None
    return all(answer == nvml.NVML_P2P_STATUS_OK for answer in answers) if pairs else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def hardware_of(
    gpus: tuple[Gpu, ...], has_nvlink: bool | None, has_peer_access: bool | None, host_gib: float | None = None
) -> Hardware:
    """Convert cards for the planner, all with the memory of the smallest; raise ConfigError if there are none.

    Args:
        gpus: The cards of this machine.
        has_nvlink, has_peer_access: Whether the cards have NVLink, and whether they reach each other's memory over
            PCIe; None if not known.
        host_gib: The machine's memory; None if not known.
    """
    if not gpus:
        raise ConfigError("There is no GPU here. Plan for others with --gpus, such as --gpus 4xA40-48GB.")
    smallest = min(gpus, key=lambda gpu: gpu.total_gib)
    typical = known_card(smallest.name) or Card(
        smallest.name, smallest.total_gib, 600, 100, PCIE4, smallest.capability
    )
    total = min(smallest.total_gib, typical.total_gib)
    link = typical.link
    if has_nvlink and not link.is_fast:
        link = NVLINK3
    elif has_nvlink is False and link.is_fast:
        link = PCIE4 if has_peer_access else PCIE4_NO_P2P
    return Hardware(len(gpus), replace(typical, total_gib=total, link=link), host_gib)


def known_card(name: str) -> Card | None:
    """Return the table's card for a driver's name such as "NVIDIA A100 80GB PCIe"; None if there is none."""
    plain = re.sub(r"RTX (?=A\d)|Generation", "", name)
    try:
        return find_card(re.sub(r"(\d+GB) PCIe", r"PCIe \1", plain))
    except ConfigError:
        return None
