"""The two kinds of memory pool of CUDA's caching allocator: segments, and an arena that grows. See `allocator`."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

KIB, MIB = 2**10, 2**20
BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB  # the largest of the small pool
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # a request from here on gets a segment of its size
ROUND_BYTES = 2 * MIB  # of such a segment
KEPT_REMAINDER_BYTES = MIB  # the most that a block of the native large pool keeps beside the request
END_OF_ARENA = 2**60


def rounded(num_bytes: int, unit: int = BLOCK_BYTES) -> int:
    """The next whole number of units."""
    return -(-num_bytes // unit) * unit


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses in one state, with its neighbours in the segment or arena.

    Args:
        address: In bytes.
        size: In bytes.
        is_free: Not given out.
        is_mapped: There is memory behind it; only pages of an arena may lack it.
        before, after: Neighbours.
    """

    address: int
    size: int
    is_free: bool = True
    is_mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def end(self) -> int:
        return self.address + self.size

    def joins(self, other: "Block | None") -> bool:
        """Whether both are free, and with or without memory."""
        return other is not None and other.is_free and other.is_mapped == self.is_mapped

    def cut(self, size: int) -> "Block":
        """Shorten it to `size`; the rest, as free and as mapped as itself."""
        rest = Block(self.address + size, self.size - size, self.is_free, self.is_mapped, self, self.after)
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def swallow(self, after: "Block") -> None:
        """Take in its neighbour."""
        self.size += after.size
        self.after = after.after
        if self.after is not None:
            self.after.before = self


class Pool(ABC):
    """Free blocks, sorted by size and address.

    Args:
        is_small: For requests of up to 1 MiB.

    Attributes:
        reserved: Bytes of all segments or mapped pages.
    """

    def __init__(self, is_small: bool) -> None:
        self.unit = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.least_rest = BLOCK_BYTES if is_small else KEPT_REMAINDER_BYTES + 1
        self.reserved = 0
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def take(self, size: int) -> Block | None:
        """The free block that fits best, cut to size; None if there is none."""
        place = self._fitting(size)
        if place == len(self._order):
            return None
        block = self._blocks.pop(self._order.pop(place)[1])
        return self._given(block, size)

    @abstractmethod
    def grow(self, size: int, room: float) -> Block | None:
        """A block from new memory of at most `room` bytes; None if that is too little."""

    def give_back(self, block: Block) -> None:
        """Join a block with its free neighbours."""
        block.is_free = True
        self._insert(self._joined(block))

    @abstractmethod
    def release(self) -> None:
        """Hand back to the card what is free as a whole."""

    def _fitting(self, size: int) -> int:
        return bisect_left(self._order, (size,))

    def _given(self, block: Block, size: int) -> Block:
        if block.size - size >= self.least_rest:
            self._insert(block.cut(size))
        block.is_free = False
        return block

    def _insert(self, block: Block) -> None:
        insort(self._order, (block.size, block.address))
        self._blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        del self._order[bisect_left(self._order, (block.size, block.address))]
        del self._blocks[block.address]

    def _joined(self, block: Block) -> Block:
        """The block with the mapped free neighbours, which leave the order."""
        before, after = block.before, block.after
        if after is not None and block.joins(after):
            self._remove(after)
            block.swallow(after)
        if before is not None and block.joins(before):
            self._remove(before)
            before.swallow(block)
            return before
        return block


class SegmentPool(Pool):
    """The native policy."""

    _next_address = 0

    def grow(self, size: int, room: float) -> Block | None:
        num_bytes = self.unit if size < OWN_SEGMENT_BYTES else rounded(size, ROUND_BYTES)
        if num_bytes > room:
            return None
        self.reserved += num_bytes
        segment = Block(self._next_address, num_bytes)
        self._next_address += num_bytes
        return self._given(segment, size)

    def release(self) -> None:
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._remove(block)
                self.reserved -= block.size


class ArenaPool(Pool):
    """The policy of `expandable_segments:True`."""

    def __init__(self, is_small: bool) -> None:
        super().__init__(is_small)
        self.least_rest = BLOCK_BYTES
        self._unmapped = {0: Block(0, END_OF_ARENA, is_mapped=False)}

    def _fitting(self, size: int) -> int:
        """A block beside unmapped pages counts with these: one that is larger, but can grow less, is taken first."""
        place = super()._fitting(size)
        while place + 1 < len(self._order) and self._reach(place + 1) < self._reach(place):
            place += 1
        return place

    def _reach(self, place: int) -> int:
        block = self._blocks[self._order[place][1]]
        return block.size + (block.after.size if block.after is not None and not block.after.is_mapped else 0)

    def grow(self, size: int, room: float) -> Block | None:
        """The lowest addresses that are free or unmapped are filled. What was mapped stays so if room runs out."""
        block = self._lowest_span(size)
        while not block.is_mapped or block.size < size:
            hole = block if not block.is_mapped else block.after
            assert hole is not None, "The arena has an unmapped end."
            needed = rounded(min(hole.size, size - block.size if block.is_mapped else size), self.unit)
            if needed > room:
                return None
            block, room = self._mapped(hole, needed), room - needed
        self._remove(block)
        return self._given(block, size)

    def _lowest_span(self, size: int) -> Block:
        """The first block of the lowest run of free and unmapped ones that is long enough."""
        for address in sorted(self._unmapped):
            hole = self._unmapped[address]
            first = hole.before if hole.before is not None and hole.before.is_free else hole
            if sum(block.size for block in _free_run(first, size)) >= size:
                return first
        raise AssertionError("The arena has an unmapped end.")

    def _mapped(self, hole: Block, num_bytes: int) -> Block:
        """The free block that the first bytes of a hole have become part of."""
        del self._unmapped[hole.address]
        if num_bytes < hole.size:
            rest = hole.cut(num_bytes)
            self._unmapped[rest.address] = rest
        hole.is_mapped = True
        self.reserved += num_bytes
        block = self._joined(hole)
        self._insert(block)
        return block

    def release(self) -> None:
        for block in list(self._blocks.values()):
            begin, end = rounded(block.address, self.unit), block.end // self.unit * self.unit
            if begin < end:
                self._unmap(block, begin, end)

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        self._remove(block)
        if end < block.end:
            self._insert(block.cut(end - block.address))
        if block.address < begin:
            front, block = block, block.cut(begin - block.address)
            self._insert(front)
        self.reserved -= block.size
        block.is_mapped = False
        self._join_holes(block)

    def _join_holes(self, block: Block) -> None:
        if block.after is not None and block.joins(block.after):
            del self._unmapped[block.after.address]
            block.swallow(block.after)
        if block.before is not None and block.joins(block.before):
            block.before.swallow(block)
        else:
            self._unmapped[block.address] = block


def _free_run(block: Block | None, size: int) -> Iterator[Block]:
    """Free and unmapped blocks from here on, no more than it takes."""
    found = 0
    while block is not None and block.is_free and found < size:
        yield block
        found += block.size
        block = block.after
