"""What the groups of a row begin with in common, as a trie: a node is a run of tokens that stands in the row once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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
