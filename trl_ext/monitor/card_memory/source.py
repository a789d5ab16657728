"""Readings of a card's memory for the audit: torch's caching allocator and the driver.

All readings are counters on the host; none waits for the card.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemorySource:
    """The allocator of one CUDA device on this rank."""

    device: torch.device

    def peak_bytes(self) -> int:
        """Most bytes allocated at once since the last `reset`."""
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        """Most bytes that the allocator held at once since the last `reset`."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset(self) -> None:
        """Start the peaks over at what is allocated and held now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def num_alloc_retries(self) -> int:
        """Allocations since the start that succeeded only after the cache was emptied."""
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the whole card, with all processes on it."""
        return torch.cuda.mem_get_info(self.device)


def source_of(device: torch.device) -> MemorySource | None:
    """The source for a torch device; None for the CPU, where there is nothing to read."""
    return MemorySource(device) if device.type == "cuda" else None
