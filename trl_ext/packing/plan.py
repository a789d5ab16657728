"""Which sequences share a flat row, and where every token of them lies. Integers only, no tensors.

A flat row is a chain of *segments*. A segment attends to itself, causally, and to at most one earlier segment of
the same row, its *prefix*:

    row:       [ prompt A ][ a1 ...   ][ a2 ...   ][ prompt B ][ b1 ... ]
    segments:    root        prefix A    prefix A    root        prefix B
    positions:   0..P-1      P..         P..         0..         ...

The plan is a pure function of its arguments: equal batches give equal plans on every rank and in every run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_ext.errors import PackingError


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
        prefix: Half-open range in the row of the segment it also attends to; empty for a root.
        is_prefix: True for shared tokens that stand here on behalf of several sequences.
    """

    start: int
    end: int
    item: int
    offset: int
    prefix: tuple[int, int]
    is_prefix: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        """Tokens that the last token of the segment attends to, itself included."""
        return self.length + self.prefix[1] - self.prefix[0]


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A flat row: its segments in order, without gaps."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end


@dataclass(frozen=True, slots=True)
class _Block:
    """Members of one group that lie in one row, behind one copy of the shared tokens."""

    members: tuple[int, ...]
    num_tokens: int


def plan_rows(items: Sequence[Item], max_tokens: int | None = None) -> list[PlannedRow]:
    """Lay every item into exactly one row.

    Args:
        items: Sequences to place.
        max_tokens: Most tokens in one row; None puts everything into a single row.

    Returns:
        Rows in the order of their first item. Without a budget there is one row, groups in order of appearance.

    Raises:
        PackingError: an item alone is longer than `max_tokens`, has no own token, or disagrees with its group about
            the number of shared tokens.
    """
    _check(items, max_tokens)
    blocks = [block for members in _groups(items) for block in _split(items, members, max_tokens)]
    return [_lay(items, row) for row in _first_fit_decreasing(blocks, max_tokens)]


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


def _lay(items: Sequence[Item], blocks: list[_Block]) -> PlannedRow:
    segments: list[Segment] = []
    end = 0
    for block in blocks:
        first = block.members[0]
        shared = items[first].shared
        prefix = (end, end)
        # A lone member needs no prefix segment: its whole sequence is one root, causal without a mask.
        share = shared > 0 and len(block.members) > 1
        if share:
            segments.append(Segment(end, end + shared, first, 0, (end, end), is_prefix=True))
            prefix = (end, end + shared)
            end += shared
        for index in block.members:
            offset = shared if share else 0
            length = items[index].length - offset
            segments.append(Segment(end, end + length, index, offset, prefix if share else (end, end)))
            end += length
    return PlannedRow(tuple(segments))
