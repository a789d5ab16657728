"""A card that a test fills by hand, in the place of `trl_ext.monitor.card_memory.MemorySource`."""

from trl_ext.memory.units import GIB


class FakeCard:
    """A card of 24 GiB whose allocator a test moves by hand."""

    def __init__(self):
        self.now = self.top = 0.0
        self.reserved = self.top_reserved = 0.0
        self.retries = 0
        self.others = 1.0

    def allocate(self, gib: float) -> None:
        """That many GiB in use, then none."""
        self.top = max(self.top, gib)
        self.reserved = max(self.reserved, gib)
        self.top_reserved = max(self.top_reserved, self.reserved)

    def peak_bytes(self):
        return int(self.top * GIB)

    def peak_reserved_bytes(self):
        return int(self.top_reserved * GIB)

    def reset(self):
        self.top, self.top_reserved = self.now, self.reserved

    def num_alloc_retries(self):
        return self.retries

    def free_and_total_bytes(self):
        return int((24 - self.reserved - self.others) * GIB), 24 * GIB
