"""What PyTorch's allocators say and do when memory runs out."""

import re
from dataclasses import dataclass

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from trl_ext.errors import TrlExtError
from trl_ext.memory.units import GIB, gib

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of PyTorch raised this: CUDA's and its kin, MPS's, or the CPU's."""
    if isinstance(error, TrlExtError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(error)


def release() -> None:
    """Give back what nothing refers to any more, graphs in reference cycles included."""
    clear_device_cache(garbage_collection=True)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Memory of this process's card, in GiB; None where it is not known.

    Args:
        allocated, reserved: By PyTorch, now.
        peak: Most that was ever allocated.
        total: Of the card.
        asked: What could not be had, from the error.
    """

    allocated: float | None = None
    reserved: float | None = None
    peak: float | None = None
    total: float | None = None
    asked: float | None = None


def numbers_of(error: BaseException) -> Numbers:
    """What is known of the card while the error is on its way."""
    asked = asked_gib(str(error))
    if not torch.cuda.is_available():
        return Numbers(asked=asked)
    return Numbers(
        allocated=gib(torch.cuda.memory_allocated()),
        reserved=gib(torch.cuda.memory_reserved()),
        peak=gib(torch.cuda.max_memory_allocated()),
        total=gib(torch.cuda.mem_get_info()[1]),
        asked=asked,
    )


def asked_gib(message: str) -> float | None:
    """What torch's sentence says it tried to allocate."""
    found = _ASKED.search(message)
    return None if found is None else float(found[1]) * _UNITS[found[2]] / GIB
