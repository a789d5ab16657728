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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.step_plan import RowSize, plan_step

# Fewest tokens that a common prefix must save. One more level of prefixes costs each layer some launches, about 15
# microseconds on a card: as much as a layer's linear work on 16 tokens of an 8B model (24 h**2 operations per token at
# h = 4096 and 400 TFLOP/s; estimated). The shared tokens of a group are shared whatever they save.
MIN_SAVED = 16


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
                f"Sequence {index} shares {item.shared} tokens and has {item.own} more. It needs at least one more."
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
        """Append a segment to the row.

        Args:
            item: Sequence whose tokens the segment has.
            end: Tokens of the sequence up to the segment's end.
            parent: The prefix that precedes the segment; None for none.
            is_prefix: Whether other segments follow it.
        """
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


# Common prefixes of the rows of a forward, if worth a segment -------------------------------------------------------


@dataclass(eq=False)
class Node:
    """Tokens that several rows share, after the tokens of the node above.

    Args:
        depth: Tokens from the beginning of a row to the end of the node; 0 for the root, which holds none.
        first: The first row that begins with them.
        members: Rows that continue alone after the node.
        children: Nodes that continue after it.
        is_of_group: True if rows of one group diverge here, which must share at least their group's tokens.
    """

    depth: int
    first: int
    members: list[int] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    is_of_group: bool = False


def prefix_tree(rows: Sequence[RowSize], members: Sequence[int], shareable: Sequence[np.ndarray]) -> Node:
    """Return the root of the tree of common prefixes, with the nodes that are worth a segment.

    Args:
        rows: Sizes of all rows.
        members: Ascending numbers of the rows in the tree.
        shareable: For every row the tokens that it may share, fewer than its length and at least its group's shared
            tokens.
    """
    root = Node(0, -1)
    _add_tokens(root, members, shareable)
    for node in reversed(_walk(root)):  # rows by number, and nodes by their first rows
        node.members.sort()
        node.children.sort(key=lambda child: child.first)
        node.first = min([*node.members[:1], *(child.first for child in node.children[:1])], default=-1)
    _mark_groups(root, rows, members)
    _prune(root)
    return root


def _add_tokens(root: Node, members: Iterable[int], shareable: Sequence[np.ndarray]) -> None:
    path, before = [root], np.empty(0, dtype=np.int64)
    # As big-endian bytes tokens sort in numeric order, so that rows with common prefixes are adjacent.
    for row in sorted(members, key=lambda i: shareable[i].astype(">i8").tobytes()):
        tokens = shareable[row]
        both = min(len(before), len(tokens))
        different = np.flatnonzero(before[:both] != tokens[:both])
        common, below = int(different[0]) if len(different) else both, None
        while path[-1].depth > common:
            below = path.pop()
        if below is not None and path[-1].depth < common:  # only the beginning of the last node is common
            path[-1].children[-1] = node = Node(common, below.first, children=[below])
            path.append(node)
        if path[-1].depth < len(tokens):
            node = Node(len(tokens), row)
            path[-1].children.append(node)
            path.append(node)
        path[-1].members.append(row)
        before = tokens


def _walk(root: Node) -> list[Node]:
    """Return all nodes, each before the nodes below it."""
    nodes = [root]
    for node in nodes:
        nodes += node.children
    return nodes


def _mark_groups(root: Node, rows: Sequence[RowSize], members: Iterable[int]) -> None:
    """Mark, for each group of several rows, the deepest node that has all of them below it."""
    sizes: dict[int, int] = {}
    for i in members:
        sizes[rows[i].group] = sizes.get(rows[i].group, 0) + 1
    below: dict[Node, dict[int, int]] = {}  # for each node the number of rows of every incomplete group below it
    for node in reversed(_walk(root)):
        counts: dict[int, int] = {}
        for child in node.children:
            for group, count in below.pop(child).items():
                counts[group] = counts.get(group, 0) + count
        for i in node.members:
            counts[rows[i].group] = counts.get(rows[i].group, 0) + 1
        whole = [group for group, count in counts.items() if count == sizes[group]]
        node.is_of_group = any(sizes[group] > 1 for group in whole)
        below[node] = {group: count for group, count in counts.items() if group not in whole}


def _prune(root: Node) -> None:
    """Remove the nodes that save too few tokens; their rows and children move to the node above."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        candidates, node.children = node.children[::-1], []
        while candidates:
            child = candidates.pop()
            users = len(child.members) + len(child.children)
            saved = (users - 1) * (child.depth - node.depth)
            if saved >= MIN_SAVED or child.is_of_group:
                node.children.append(child)
            else:
                node.members += child.members
                candidates += child.children[::-1]
        waiting += node.children
