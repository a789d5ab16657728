"""A replica of PyTorch's CUDACachingAllocator: what a sequence of allocations and frees makes it reserve on a card.

Facts: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13, with its defaults (no
max_split_size, no rounding to powers of two, no garbage collection). Requests are rounded to 512 bytes; up to 1 MiB
they come from the small pool, above from the large one; a pool gives the smallest free block that is large enough, the
lowest address among equals, cuts off what is not needed and joins free neighbours again.

    native      a pool grows by segments: 2 MiB small; large 20 MiB for less than 10 MiB, else the request in whole
                2 MiB. A large block keeps a remainder of up to 1 MiB. Only segments that are free as a whole go back.
    expandable  a pool is one arena that grows at its end, by pages of 2 MiB (small) or 20 MiB (large). Every free page
                goes back, also between blocks in use, and its place is filled again before the end grows.

Left out: streams but one (ZeRO-3's overlap_comm and communication take others, whose blocks no other stream may reuse:
real runs reserve more), private pools of CUDA graphs, memory that kernels take beside the allocator. Addresses of
segments rise in the order of their making, and an arena is never full.
"""

from collections.abc import Hashable

from trl_ext.twin.pools import BLOCK_BYTES, SMALL_REQUEST_BYTES, ArenaPool, Block, Pool, SegmentPool, rounded


class CachingAllocator:
    """Two pools under one cap.

    Args:
        expandable: Whether `expandable_segments:True` is set.
        cap_bytes: What the card has for it; None for no end.

    Attributes:
        allocated: Bytes of blocks in use, as `torch.cuda.memory_allocated` tells.
        reserved: Bytes taken from the card.
        peak_reserved: The most of them since the last `reset_peak`.
        num_retries: How often the cache had to be emptied for a request.
    """

    def __init__(self, expandable: bool, cap_bytes: int | None = None) -> None:
        kind = ArenaPool if expandable else SegmentPool
        self.cap_bytes = cap_bytes
        self.allocated = self.peak_reserved = self.num_retries = 0
        self._small, self._large = kind(is_small=True), kind(is_small=False)
        self._live: dict[Hashable, tuple[Pool, Block]] = {}

    @property
    def reserved(self) -> int:
        return self._small.reserved + self._large.reserved

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Give out a block of at least `num_bytes`, to be freed by `key`.

        Raises:
            MemoryError: The cap leaves no room for it, with the cache emptied.
        """
        size = max(rounded(num_bytes), BLOCK_BYTES)
        pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
        block = pool.take(size) or self._grown(pool, size)
        self._live[key] = pool, block
        self.allocated += block.size

    def free(self, key: Hashable) -> None:
        """Put a block back into the cache."""
        pool, block = self._live.pop(key)
        self.allocated -= block.size
        pool.give_back(block)

    def empty_cache(self) -> None:
        """Hand back to the card what is free, as `torch.cuda.empty_cache` does."""
        self._large.release()
        self._small.release()

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_reserved = self.reserved

    def _grown(self, pool: Pool, size: int) -> Block:
        block = pool.grow(size, self._room)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = pool.grow(size, self._room)
        if block is None:
            raise MemoryError(
                f"{size} bytes do not fit beside {self.reserved} reserved ones under a cap of {self.cap_bytes}. Raise "
                "the cap, or allocate less."
            )
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    @property
    def _room(self) -> float:
        return float("inf") if self.cap_bytes is None else self.cap_bytes - self.reserved
