"""Plan the flat rows of sequences, and the place of every token in them. Integers only, no tensors.

A flat row consists of *segments*. A segment attends to itself, causally, and to a chain of earlier segments of the
same row, its *prefixes*: a common prefix of several sequences is in the row once.

    row:       [ system ][ prompt A  ][ prompt B  ][ a1 ...      ][ a2 ... ][ b1 ...      ]
    prefixes:    none      system       system       system, A     the same   system, B
    positions:   0..S-1    S..          S..          S+A..                    S+B..

Prefixes come before the sequences that use them, outer before inner. The queries that see the prefixes of one level
are then adjacent, except where prefixes of different roots are nested.

The plan is a pure function of its arguments: equal batches give equal plans on every rank and in every run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.step_plan import RowSize, plan_step
from trl_ext.packing.trie import Node, prefix_tree


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a flat row.

    Args:
        start, end: Half-open range in the row.
        item: Index of the sequence of these tokens (for a prefix: of its first member).
        offset: Position of the segment's first token in the sequence.
        parent: Number of the segment with the tokens just before; None for a root.
        is_prefix: True for tokens that several sequences share.
    """

    start: int
    end: int
    item: int
    offset: int
    parent: int | None
    is_prefix: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        """Tokens that the last token of the segment attends to, including itself."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A flat row: its segments in order, without gaps, a parent before its children.

    Args:
        segments: The first segments may be cached: their keys and values come from an earlier forward.
        num_cached: Tokens of the cached segments.
        is_prefix: Whether the row is a prefix to be cached, without scored tokens.
    """

    segments: tuple[Segment, ...]
    num_cached: int = 0
    is_prefix: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.segments[-1].end - self.num_cached

    @property
    def forwarded(self) -> tuple[Segment, ...]:
        """The segments whose tokens go through the model."""
        return tuple(segment for segment in self.segments if segment.start >= self.num_cached)

    def place(self, segment: Segment, token: int) -> int:
        """Return the row index of token number `token` of a sequence; `segment` ends at or after it."""
        while token < segment.offset:
            assert segment.parent is not None, "The chain of prefixes holds the whole beginning."
            segment = self.segments[segment.parent]
        return segment.start + token - segment.offset


def plan_rows(
    items: Sequence[RowSize],
    max_tokens: int | None = None,
    shareable: Sequence[np.ndarray] | None = None,
    prefix_multiple: int | None = None,
) -> list[PlannedRow]:
    """Assign every item to exactly one row.

    Args:
        items: Sequences to place.
        max_tokens: Most tokens of a row, or the longest item's if larger: it is too late to reject it. None puts
            everything into a single row.
        shareable: For every item the tokens that it may share with others in its row: fewer than its length, and at
            least the tokens that its group shares. None: items share with their group only.
        prefix_multiple: If set, the shared tokens of a group that is cut may be a separate row, cached for the rows
            after it, with a multiple of this number of tokens. None: each row holds all that it needs.

    Returns:
        Rows in the order of their first item, rows of groups with a cached prefix first.

    Raises:
        PackingError: An item has `own` < 1, or disagrees with its group about the number of shared tokens.
    """
    _check(items)
    if shareable is None:  # one number for all tokens of a group, which no other group has
        shareable = [np.full(item.shared, item.group) for item in items]
    if max_tokens is None:
        return [_lay(items, range(len(items)), shareable)]
    plan = plan_step(items, 1, max_tokens, math.inf, caches=prefix_multiple is not None)
    forwards, rows = plan.forwards[0], []
    for group in plan.prefix_groups:
        first = items[forwards[group.begin][0]]
        length = first.shared - first.shared % (prefix_multiple or 1)
        rows.append(prefix_row(forwards[group.begin][0], length))
        rows += [behind(_lay(items, row, shareable), length) for row in forwards[group.begin : group.end]]
    others = forwards[plan.prefix_groups[-1].end :] if plan.prefix_groups else forwards
    return rows + [_lay(items, row, shareable) for row in sorted(others) if row]


def _check(items: Sequence[RowSize]) -> None:
    if not items:
        raise PackingError("There is nothing to pack: 0 sequences. Give at least one.")
    shared: dict[int, int] = {}
    for index, item in enumerate(items):
        if item.own < 1 or item.shared < 0:
            raise PackingError(
                f"Sequence {index} has {item.shared} shared and {item.own} own tokens. It needs one own."
            )
        if shared.setdefault(item.group, item.shared) != item.shared:
            raise PackingError(
                f"Sequence {index} shares {item.shared} tokens but its group {item.group} shares "
                f"{shared[item.group]}. Members of a group share the same tokens."
            )


def _lay(items: Sequence[RowSize], row: Sequence[int], shareable: Sequence[np.ndarray]) -> PlannedRow:
    """Lay items into one row: prefixes by level, then sequences with a prefix, then the others."""
    prefixes: list[tuple[int, Node, Node | None]] = []  # level, node, parent
    leaves: list[tuple[int, Node | None]] = []  # sequence, parent
    waiting: list[tuple[int, Node, Node | None]] = [(0, prefix_tree(items, row, shareable), None)]
    while waiting:  # depth first
        level, node, parent = waiting.pop()
        if node.depth:
            prefixes.append((level, node, parent))
        here = node if node.depth else None
        leaves += [(member, here) for member in node.members]
        waiting += [(level + 1, child, here) for child in reversed(node.children)]
    prefixes.sort(key=lambda one: one[0])
    leaves.sort(key=lambda leaf: leaf[1] is None)

    segments: list[Segment] = []
    numbers: dict[int, int] = {}

    def lay(item: int, end: int, parent: Node | None, is_prefix: bool) -> None:
        start = segments[-1].end if segments else 0
        offset = parent.depth if parent else 0
        above = numbers[id(parent)] if parent else None
        segments.append(Segment(start, start + end - offset, item, offset, above, is_prefix))

    for _, node, parent in prefixes:
        numbers[id(node)] = len(segments)
        lay(node.first, node.depth, parent, is_prefix=True)
    for member, parent in leaves:
        lay(member, items[member].length, parent, is_prefix=False)
    return PlannedRow(tuple(segments))


def prefix_row(item: int, num_tokens: int) -> PlannedRow:
    """Return a row of only the first tokens of a sequence, to be cached for rows that begin with them."""
    return PlannedRow((Segment(0, num_tokens, item, 0, None, is_prefix=True),), is_prefix=True)


def behind(row: PlannedRow, num_cached: int) -> PlannedRow:
    """Return a row without the first `num_cached` tokens, which all its sequences share and the cache holds."""
    segments = list(prefix_row(row.segments[0].item, num_cached).segments)
    numbers: list[int] = []
    for segment in row.segments:
        if segment.num_keys <= num_cached:
            numbers.append(0)
            continue
        start, offset = segments[-1].end, max(segment.offset, num_cached)
        parent = 0 if segment.offset <= num_cached or segment.parent is None else numbers[segment.parent]
        numbers.append(len(segments))
        end = start + segment.num_keys - offset
        segments.append(replace(segment, start=start, end=end, offset=offset, parent=parent))
    return PlannedRow(tuple(segments), num_cached)
