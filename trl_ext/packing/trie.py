"""What the rows of a forward begin with in common, and which of it is worth a segment. Integers only, no tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trl_ext.packing.step_plan import RowSize

# Fewest tokens that a common beginning must save. One more level of prefixes costs each layer some launches, about 15
# microseconds on a card: as much as a layer's linear work on 16 tokens of an 8B model (24 h**2 operations a token at
# h = 4096 and 400 TFLOP/s; estimated). What the rows of one group share is shared whatever it saves.
MIN_SAVED = 16


@dataclass(eq=False)
class Node:
    """Tokens that several rows begin with, after the tokens of the node above.

    Args:
        depth: Tokens from the beginning of a row to the end of the node; 0 for the root, which holds none.
        first: The first row that begins so.
        members: Rows that go on from here on their own.
        children: Nodes that go on from here.
        is_of_group: True where rows of one group part, which are promised to share at least what their group does.
    """

    depth: int
    first: int
    members: list[int] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    is_of_group: bool = False


def prefix_tree(
    rows: Sequence[RowSize], members: Sequence[int], shareable: Sequence[np.ndarray] | None = None
) -> Node:
    """Return the root of the tree of what some rows begin with, with the nodes that are worth a segment.

    Args:
        rows: Sizes of all rows.
        members: Numbers of those in the tree, ascending.
        shareable: Of every row the tokens that it may share, less than its length and at least what its group shares.
            None: rows share with their group alone.
    """
    root = Node(0, -1)
    if shareable is None:
        _add_groups(root, rows, members)
    else:
        _add_tokens(root, members, shareable)
    _order(root)
    _mark_groups(root, rows, members)
    _prune(root)
    return root


def _add_groups(root: Node, rows: Sequence[RowSize], members: Iterable[int]) -> None:
    nodes: dict[int, Node] = {}
    for i in members:
        node = root
        if rows[i].shared:
            node = nodes.setdefault(rows[i].group, Node(rows[i].shared, i))
        node.members.append(i)
    root.children += nodes.values()


def _add_tokens(root: Node, members: Iterable[int], shareable: Sequence[np.ndarray]) -> None:
    path, before = [root], np.empty(0, dtype=np.int64)
    # As big-endian bytes tokens sort in the order of their numbers, so that common beginnings are neighbours.
    for row in sorted(members, key=lambda i: shareable[i].astype(">i8").tobytes()):
        tokens = shareable[row]
        common, below = _num_common(before, tokens), None
        while path[-1].depth > common:
            below = path.pop()
        if below is not None and path[-1].depth < common:  # only the beginning of what stood there is common
            path[-1].children[-1] = node = Node(common, below.first, children=[below])
            path.append(node)
        if path[-1].depth < len(tokens):
            node = Node(len(tokens), row)
            path[-1].children.append(node)
            path.append(node)
        path[-1].members.append(row)
        before = tokens


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _walk(root: Node) -> list[Node]:
    """Return all nodes, each before those below it."""
    nodes = [root]
    for node in nodes:
        nodes += node.children
    return nodes


def _order(root: Node) -> None:
    """Put rows, and nodes by their first rows, in the order of their numbers."""
    for node in reversed(_walk(root)):
        node.members.sort()
        node.children.sort(key=lambda child: child.first)
        node.first = min([*node.members[:1], *(child.first for child in node.children[:1])], default=-1)


def _mark_groups(root: Node, rows: Sequence[RowSize], members: Iterable[int]) -> None:
    """Mark the last node where all rows of a group are together, of each group with several rows that has one."""
    sizes: dict[int, int] = {}
    for i in members:
        sizes[rows[i].group] = sizes.get(rows[i].group, 0) + 1
    below: dict[Node, dict[int, int]] = {}  # of each node the rows of every group that is not whole below it
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
