"""What the rows of a forward begin with in common, and which of it is worth a segment. Integers only, no tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Fewest tokens that a common beginning must save. One more level of prefixes costs each layer some launches, about 15
# microseconds on a card: as much as a layer's linear work on 16 tokens of an 8B model (24 h**2 operations a token at
# h = 4096 and 400 TFLOP/s; estimated). What the rows of one group share is shared whatever it saves.
MIN_SAVED = 16


@dataclass(frozen=True, slots=True)
class RowSize:
    """Tokens of one row.

    Args:
        group: Rows with the same number begin with the same `shared` tokens.
        shared: Leading tokens that are forwarded once for the rows of a group in the same forward.
        own: Tokens after these, at least 1.
        forks: Where the row parts from others, first place first: its leading tokens up to there, and a number that
            rows have in common which begin with the same so many. None: it shares with its group alone.
    """

    group: int
    shared: int
    own: int
    forks: tuple[tuple[int, int], ...] | None = None

    @property
    def length(self) -> int:
        return self.shared + self.own

    @property
    def beginnings(self) -> tuple[tuple[int, int], ...]:
        """The forks of the row; where they are not known, the end of what its group shares."""
        if self.forks is not None:
            return self.forks
        return ((self.shared, self.group),) if self.shared else ()


def find_forks(rows: Sequence[RowSize], tokens: Sequence[np.ndarray]) -> list[RowSize]:
    """Return the rows with their forks.

    Args:
        rows: Their sizes.
        tokens: Of each row what it may share, less than its length and at least what its group shares.
    """
    depths, parents = [0], [-1]
    path, ends = [0], {}
    before = np.empty(0, dtype=np.int64)

    def add(depth: int) -> int:
        depths.append(depth)
        parents.append(path[-1])
        path.append(len(depths) - 1)
        return path[-1]

    # As big-endian bytes tokens sort in the order of their numbers, so that what begins alike lies side by side.
    for row in sorted(range(len(rows)), key=lambda i: tokens[i].astype(">i8").tobytes()):
        common = _num_common(before, tokens[row])
        below = None
        while depths[path[-1]] > common:
            below = path.pop()
        if below is not None and depths[path[-1]] < common:
            parents[below] = add(common)  # only the beginning of what stood there is common
        if depths[path[-1]] < len(tokens[row]):
            add(len(tokens[row]))
        ends[row] = path[-1]
        before = tokens[row]

    def forks(end: int) -> tuple[tuple[int, int], ...]:
        found = []
        while end:
            found.append((depths[end], end))
            end = parents[end]
        return tuple(reversed(found))

    return [replace(row, forks=forks(ends[i])) for i, row in enumerate(rows)]


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@dataclass(eq=False)
class Node:
    """Tokens that several rows begin with, after those of the node above.

    Args:
        depth: Tokens from the beginning of a row to the end of the node; 0 for the root, which holds none.
        first: A row that begins so.
        members: Rows that go on from here on their own.
        children: Nodes that go on from here.
        is_of_group: True where rows of one group part, which are promised to share at least what their group does.
    """

    depth: int
    first: int
    members: list[int] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    is_of_group: bool = False


def grow(rows: Sequence[RowSize], members: Iterable[int]) -> Node:
    """Return the root of the trie of some rows, with the nodes that are worth a segment."""
    root = Node(0, -1)
    nodes: dict[tuple[int, int], Node] = {}
    groups: dict[int, list[int]] = {}
    for i in members:
        node = root
        for fork in rows[i].beginnings:
            if fork not in nodes:
                nodes[fork] = Node(fork[0], i)
                node.children.append(nodes[fork])
            node = nodes[fork]
        node.members.append(i)
        groups.setdefault(rows[i].group, []).append(i)
    for group in groups.values():
        if last := _last_common(rows, group):
            nodes[last].is_of_group = True
    _prune(root)
    return root


def _last_common(rows: Sequence[RowSize], group: list[int]) -> tuple[int, int] | None:
    """Return the fork up to which all rows of a group go together; None if there is one row, or no such place."""
    if len(group) == 1:
        return None
    paths = [rows[i].beginnings for i in group]
    together = [one for one, other in zip(min(paths), max(paths), strict=False) if one == other]
    return together[-1] if together else None


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
            if saved >= MIN_SAVED or child.is_of_group:
                node.children.append(child)
            else:
                node.members += child.members
                candidates += child.children[::-1]
        waiting += node.children


def spans(rows: Sequence[RowSize], members: Iterable[int]) -> list[tuple[int, int]]:
    """Return, of every segment of a flat row that holds these rows, the tokens before it and up to its end."""
    found: list[tuple[int, int]] = []
    waiting = [grow(rows, members)]
    while waiting:
        node = waiting.pop()
        ends = [child.depth for child in node.children] + [rows[i].length for i in node.members]
        found += [(node.depth, end) for end in ends]
        waiting += node.children
    return found
