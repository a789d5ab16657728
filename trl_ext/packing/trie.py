"""Common prefixes of the rows of a forward, if worth a segment. Integers only, no tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trl_ext.packing.step_plan import RowSize

# Fewest tokens that a common prefix must save. One more level of prefixes costs each layer some launches, about 15
# microseconds on a card: as much as a layer's linear work on 16 tokens of an 8B model (24 h**2 operations per token at
# h = 4096 and 400 TFLOP/s; estimated). The shared tokens of a group are shared whatever they save.
MIN_SAVED = 16


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
