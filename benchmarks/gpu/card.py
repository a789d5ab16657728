"""The card: what it is called, what drives it, what it could compute at most."""

import subprocess

import torch

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import find_card
from trl_ext.memory.units import gib


def has_card() -> bool:
    return torch.cuda.is_available()


def card_bytes(device: str) -> int | None:
    """Memory of the card as torch tells it; None on a processor."""
    return int(torch.cuda.get_device_properties(0).total_memory) if device == "cuda" else None


def peak_tflops(card: str) -> float | None:
    """Dense bf16 operations a second, 1e12 of them, by the table of `trl_ext.memory.cards` (the vendors' data sheets).

    Args:
        card: As torch calls it. None for a card that is not in the table.
    """
    try:
        return find_card(card).bf16_tflops
    except ConfigError:
        return None


def card_facts(device: str) -> dict[str, str | float | None]:
    """Driver, CUDA, GiB in all, and the most that it computes; nothing on a processor."""
    if device == "cpu":
        return {}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "card_gib": round(gib(card_bytes(device) or 0), 1),
        "peak_bf16_tflops": peak_tflops(torch.cuda.get_device_name()),
    }
