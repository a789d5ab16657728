"""Rows that processes share in lines, as their tables say; without processes."""

import torch

from trl_ext.packing.layout import FlatRow
from trl_ext.packing.plan import PlannedRow
from trl_ext.packing.table import SegmentTable
from trl_ext.packing.ulysses import SequenceGroup


def lines_of(
    row: PlannedRow, size: int, num_heads: int, device: torch.device | str = "cpu"
) -> list[tuple[list[int], SegmentTable]]:
    """Of every line of a group of processes the numbers of its queries in the padded row, and its table."""
    table = SegmentTable(row.segments, torch.device(device))
    flat = FlatRow(*torch.zeros(2, 1, row.num_tokens, dtype=torch.int64, device=device), table)
    each = -(-row.num_tokens // size)
    lines = SequenceGroup(size, 0).lines(num_heads)
    found = []
    for rank, parts in zip(range(0, size, len(lines[0])), lines, strict=True):
        numbers = [token for part in parts for token in range(part * each, (part + 1) * each)]
        found.append((numbers, flat.part(SequenceGroup(size, rank)).table.of_line(num_heads)))
    return found
