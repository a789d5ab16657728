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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.step_plan import RowSize, plan_step


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


# Fewest tokens that a beginning common to several groups must save. One more level of prefixes costs each layer some
# launches, about 15 microseconds on a card: as much as a layer's linear work on 16 tokens of an 8B model (24 h**2
# operations a token at h = 4096 and 400 TFLOP/s; estimated). The tokens of one group are shared whatever they save.
MIN_SAVED = 16


@dataclass(eq=False)
class Node:
    """Tokens that several sequences begin with, behind those of the node above.

    Args:
        depth: Tokens from the beginning of a sequence to the end of the node; 0 for the root, which holds none.
        first: A sequence that begins so.
        members: Sequences that go on from here on their own.
        children: Nodes that go on from here.
    """

    depth: int
    first: int
    members: list[int] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)


def grow(
    members: Mapping[int, Sequence[int]], shared: Mapping[int, int], beginnings: Mapping[int, np.ndarray]
) -> Node:
    """Return the root of the trie of some groups, with the nodes that are worth a segment.

    Args:
        members: The sequences of every group.
        shared: How many tokens the sequences of a group share.
        beginnings: These tokens. A group that is not named has nothing in common with others.
    """
    # As big-endian bytes tokens sort in the order of their numbers, so that what begins alike lies side by side.
    ordered = sorted(members, key=lambda g: beginnings[g].astype(">i8").tobytes() if g in beginnings else b"")
    root = Node(0, -1)
    path = [root]
    before = None
    for group in ordered:
        tokens = beginnings.get(group)
        common = _num_common(before, tokens)
        below = None
        while path[-1].depth > common:
            below = path.pop()
        if below is not None and path[-1].depth < common:
            # Only the beginning of a node is common: it is cut in two.
            path[-1].children.remove(below)
            _add(path, Node(common, below.first, children=[below]))
        if path[-1].depth < shared[group]:
            _add(path, Node(shared[group], members[group][0]))
        path[-1].members.extend(members[group])
        before = tokens
    _prune(root)
    return root


def _add(path: list[Node], node: Node) -> None:
    path[-1].children.append(node)
    path.append(node)


def _num_common(one: np.ndarray | None, other: np.ndarray | None) -> int:
    if one is None or other is None:
        return 0
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _prune(root: Node) -> None:
    """Take out the nodes that save too little; what hung on them hangs on the node above."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        candidates, node.children = node.children[::-1], []
        while candidates:
            child = candidates.pop()
            users = len(child.members) + len(child.children)
            saved = (users - 1) * (child.depth - node.depth)
            if len(child.members) > 1 or saved >= MIN_SAVED:
                node.children.append(child)
            else:
                node.members += child.members
                candidates += child.children[::-1]
        waiting += node.children


def plan_rows(
    items: Sequence[RowSize], max_tokens: int | None = None, beginnings: dict[int, np.ndarray] | None = None
) -> list[PlannedRow]:
    """Lay every item into exactly one row.

    Args:
        items: Sequences to place.
        max_tokens: Most tokens in one row, or those of the longest item if they are more: it is too late to refuse
            it. None puts everything into a single row.
        beginnings: The shared tokens of every group, if groups may share among each other what these begin with.

    Returns:
        Rows in the order of their first item. Without a budget there is one row.

    Raises:
        PackingError: an item has no own token, or disagrees with its group about the number of shared tokens.
    """
    _check(items)
    everything = [tuple(range(len(items)))]
    rows = everything if max_tokens is None else sorted(plan_step(items, 1, max_tokens, math.inf).forwards[0])
    return [_lay(items, row, beginnings or {}) for row in rows]


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


def _lay(items: Sequence[RowSize], row: Sequence[int], beginnings: dict[int, np.ndarray]) -> PlannedRow:
    """Lay items into one row: prefixes by level, then sequences with a prefix, then those without."""
    members: dict[int, list[int]] = {}
    for index in row:
        members.setdefault(items[index].group, []).append(index)
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
