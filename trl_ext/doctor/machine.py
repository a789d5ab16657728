"""Cards as our planner knows them: from what the driver says to `Hardware`."""

import re
from dataclasses import replace

from trl_ext.doctor.facts import Gpu
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import NVLINK3, PCIE4, PCIE4_NO_P2P, Card, Hardware, find_card


def hardware_of(
    gpus: tuple[Gpu, ...], has_nvlink: bool | None, has_peer_access: bool | None, host_gib: float | None = None
) -> Hardware:
    """Found cards for the planner: as many as there are, each as small as the smallest.

    Raises:
        ConfigError: There is no card.
    """
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
    """The table's card for the driver's name, None if it has none: "NVIDIA A100 80GB PCIe", "NVIDIA RTX A6000"."""
    words = re.sub(r"\b(NVIDIA|Generation)\b|-SXM\d?", " ", name).split()
    tried = [" ".join(words), " ".join(word for word in words if word != "RTX")]
    if "PCIe" in words or any(word.endswith("-PCIE") for word in words):
        plain = [word.removesuffix("-PCIE") for word in words if word != "PCIe"]
        tried = [" ".join([plain[0], "PCIe", *plain[1:]]), *tried]
    for words_tried in tried:
        try:
            return find_card(words_tried)
        except ConfigError:
            continue
    return None
