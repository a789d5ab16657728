"""Readings of a card's memory for the audit: torch's caching allocator and the driver.

All readings are counters on the host; none waits for the card.
"""

from dataclasses import dataclass
from typing import Any, Protocol


class MemorySource(Protocol):
    """A card's memory on this rank. The audit's tests bring one of their own."""

    def peak_bytes(self) -> int:
        """Most bytes allocated at once since the last `reset`."""
        ...

    def peak_reserved_bytes(self) -> int:
        """Most bytes that the allocator held at once since the last `reset`."""
        ...

    def reset(self) -> None:
        """Start the peaks over at what is allocated and held now."""
        ...

    def num_alloc_retries(self) -> int:
        """Allocations since the start that succeeded only after the cache was emptied."""
        ...

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the whole card, with all processes on it."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """The allocator of one CUDA device."""

    device: Any

    def peak_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_reserved(self.device)

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self.device)

    def num_alloc_retries(self) -> int:
        import torch

        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(self.device)


def source_of(device: Any) -> MemorySource | None:
    """The source for a torch device; None for the CPU, where there is nothing to read."""
    return CudaMemory(device) if device.type == "cuda" else None
