"""Which sequences share a flat row, and where every token of them lies. Integers only, no tensors.

A flat row is made of *segments*. A segment attends to itself, causally, and to a chain of earlier segments of the same
row, its *prefixes*: what several sequences begin with stands there once.

    row:       [ system ][ prompt A  ][ prompt B  ][ a1 ...      ][ a2 ... ][ b1 ...      ]
    prefixes:    none      system       system       system, A     the same   system, B
    positions:   0..S-1    S..          S..          S+A..                    S+B..

Prefixes stand before the sequences that use them, the outer before the inner ones: then the queries that see the
prefixes of one level lie side by side, but where prefixes of different roots are nested.

The plan is a pure function of its arguments: equal batches give equal plans on every rank and in every run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.trie import Node, grow


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to place.

    Args:
        group: Sequences with the same number start with the same `shared` tokens.
        shared: Leading tokens that may be forwarded once for the whole group.
        own: Tokens after the shared ones, at least 1.
    """

    group: int
    shared: int
    own: int

    @property
    def length(self) -> int:
        return self.shared + self.own


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a flat row.

    Args:
        start, end: Half-open range in the row.
        item: Index of the sequence whose tokens these are (for a prefix: of its first member).
        offset: Position, inside the sequence, of the segment's first token.
        parent: Number of the segment that holds the tokens just before; None for a root.
        is_prefix: True for shared tokens that stand here on behalf of several sequences.
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
        """Tokens that the last token of the segment attends to, itself included."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A flat row: its segments in order, without gaps, a parent before its children."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end

    def place(self, segment: Segment, token: int) -> int:
        """Return where a token of the segment's sequence lies in the row.

        Args:
            segment: One that ends at or behind the token.
            token: Its number in the sequence.
        """
        while token < segment.offset:
            assert segment.parent is not None, "The chain of prefixes holds the whole beginning."
            segment = self.segments[segment.parent]
        return segment.start + token - segment.offset


@dataclass(frozen=True, slots=True)
class _Block:
    """Members of one group that lie in one row, behind one copy of the shared tokens."""

    members: tuple[int, ...]
    num_tokens: int


def plan_rows(
    items: Sequence[Item], max_tokens: int | None = None, beginnings: dict[int, np.ndarray] | None = None
) -> list[PlannedRow]:
    """Lay every item into exactly one row.

    Args:
        items: Sequences to place.
        max_tokens: Most tokens in one row; None puts everything into a single row.
        beginnings: The shared tokens of every group, if groups may share among each other what these begin with.

    Returns:
        Rows in the order of their first item. Without a budget there is one row.

    Raises:
        PackingError: an item alone is longer than `max_tokens`, has no own token, or disagrees with its group about
            the number of shared tokens.
    """
    _check(items, max_tokens)
    blocks = [block for members in _groups(items) for block in _split(items, members, max_tokens)]
    return [_lay(items, row, beginnings or {}) for row in _first_fit_decreasing(blocks, max_tokens)]


def _check(items: Sequence[Item], max_tokens: int | None) -> None:
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
        if max_tokens is not None and item.length > max_tokens:
            raise PackingError(
                f"Sequence {index} has {item.length} tokens but a forward may hold {max_tokens}. "
                f"Set max_tokens_per_forward to at least {item.length}, or shorten the sequences."
            )


def _groups(items: Sequence[Item]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        members.setdefault(item.group, []).append(index)
    return list(members.values())


def _split(items: Sequence[Item], members: list[int], max_tokens: int | None) -> list[_Block]:
    """Cut a group that is over the budget into blocks, each with its own copy of the shared tokens."""
    shared = items[members[0]].shared
    if max_tokens is None or shared + sum(items[i].own for i in members) <= max_tokens:
        return [_Block(tuple(members), shared + sum(items[i].own for i in members))]
    bins: list[list[int]] = []
    used: list[int] = []
    # Longest first: a long completion that comes late opens a block, and a copy of the prompt, of its own.
    for index in sorted(members, key=lambda i: (-items[i].own, i)):
        own = items[index].own
        place = next((b for b, tokens in enumerate(used) if tokens + own <= max_tokens), None)
        if place is None:
            bins.append([index])
            used.append(shared + own)
        else:
            bins[place].append(index)
            used[place] += own
    return [_Block(tuple(sorted(b)), tokens) for b, tokens in zip(bins, used, strict=True)]


def _first_fit_decreasing(blocks: list[_Block], max_tokens: int | None) -> list[list[_Block]]:
    if max_tokens is None:
        return [blocks]
    rows: list[list[_Block]] = []
    used: list[int] = []
    for block in sorted(blocks, key=lambda b: (-b.num_tokens, b.members)):
        place = next((r for r, tokens in enumerate(used) if tokens + block.num_tokens <= max_tokens), None)
        if place is None:
            rows.append([block])
            used.append(block.num_tokens)
        else:
            rows[place].append(block)
            used[place] += block.num_tokens
    ordered = [sorted(row, key=lambda b: b.members) for row in rows]
    return sorted(ordered, key=lambda row: row[0].members)


def _lay(items: Sequence[Item], blocks: list[_Block], beginnings: dict[int, np.ndarray]) -> PlannedRow:
    """Lay blocks into one row: prefixes by level, then sequences with a prefix, then those without."""
    # Two blocks of a group meet in a row only where neither had room for the other's members; together they share.
    members: dict[int, list[int]] = {}
    for block in blocks:
        members.setdefault(items[block.members[0]].group, []).extend(block.members)
    shared = {group: items[m[0]].shared for group, m in members.items()}
    prefixes: list[tuple[int, Node, Node | None]] = []  # level, node, parent
    leaves: list[tuple[int, Node | None]] = []  # sequence, parent
    waiting: list[tuple[int, Node, Node | None]] = [(0, grow(members, shared, beginnings), None)]
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
