"""Read cards from NVIDIA's management library (nvidia-ml-py, imported as pynvml), without starting CUDA."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from trl_ext.doctor.facts import Facts, Gpu
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import NVLINK3, PCIE4, PCIE4_NO_P2P, Card, Hardware, find_card
from trl_ext.memory.units import gib


def read_cards(nvml: Any, visible: str | None) -> Facts:
    """Read all cards that CUDA would show, and the driver; other facts are left empty.

    `nvml` is the module pynvml; `visible` is CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Facts(no_gpus=f"the NVIDIA driver does not answer ({error})")
    try:
        return _cards(nvml, visible)
    except nvml.NVMLError as error:
        return Facts(no_gpus=f"the NVIDIA driver answers with an error ({error})")
    finally:
        nvml.nvmlShutdown()


def _cards(nvml: Any, visible: str | None) -> Facts:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    shown = shown_by(visible, [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles])
    handles = [handles[index] for index in shown]
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
    )


def shown_by(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return positions of the cards that CUDA_VISIBLE_DEVICES shows, in its order.

    Like CUDA it stops at the first word that names no card.
    """
    if visible is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for word in map(str.strip, visible.split(",")):
        found = [at for at, uuid in enumerate(uuids) if word and (word == str(at) or uuid.startswith(word))]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
    return shown


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    kept = _or(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved, 0)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_gib=round(gib(memory.total - kept), 2),
        free_gib=round(gib(memory.free), 2),
        capability=(capability[0], capability[1]),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        is_split=_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0) == 1,
    )


def _or(nvml: Any, ask: Callable[[], int], otherwise: int) -> int:
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
    """Convert cards for the planner, all with the memory of the smallest; raise ConfigError if there are none."""
    if not gpus:
        raise ConfigError("There is no GPU here. Plan for others with --gpus, such as --gpus 4xA40-48GB.")
    smallest = min(gpus, key=lambda gpu: gpu.total_gib)
    known = known_card(smallest.name)
    total = smallest.total_gib if known is None else min(smallest.total_gib, known.total_gib)
    typical = known or Card(smallest.name, total, 600, 100, PCIE4, smallest.capability)
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
