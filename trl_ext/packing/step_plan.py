"""Which rows of an optimizer step go through the model in which forward, on which rank. Integers only, no tensors.

Every rank plans the whole step and takes its own part, so that no rank has to ask another one. What is balanced is the
time of a forward, not its tokens: attention grows with the square of a sequence. Rows of one group stay together, so
that what they share is forwarded once; how they share it is the layout's business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.trie import RowSize

# Slowest over mean rank: below it groups stay whole. A cut group costs a second copy of its prompt.
BALANCED = 1.05


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The forwards of an optimizer step.

    Args:
        forwards: For every rank its forwards, each the row numbers that it holds, ascending. Equally many on every
            rank: the forwards of ZeRO-3 and DDP are collectives. May be empty where there are fewer rows than places.
        max_tokens: Most tokens of a forward.
        costs: Of every rank, as in `forward_cost`.
    """

    forwards: tuple[tuple[tuple[int, ...], ...], ...]
    max_tokens: int
    costs: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean; 1 where there is nothing to do."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0

    def largest(self, place: int) -> int:
        """Return the most rows that any rank has in its forward number `place`."""
        return max(len(forwards[place]) for forwards in self.forwards)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows that share a forward, such as those of one group.

    Args:
        rows: Their numbers.
        tokens: Of the forward, if nothing else is in it.
        cost: As in `forward_cost`.
    """

    rows: tuple[int, ...]
    tokens: int
    cost: float


def forward_cost(rows: Sequence[RowSize], hidden_size: float) -> float:
    """Cost of a forward of one group's rows, in units of one token through the linear layers.

    A token costs about 24 h**2 operations a layer in the linear layers (attention projections 8 h**2, a gated MLP
    16 h**2), a query that looks at a key 4 h: scores and their sum over the values.

    Args:
        rows: Rows of one group; what they share is forwarded once.
        hidden_size: h.
    """
    shared = rows[0].shared
    tokens = shared + sum(row.own for row in rows)
    looks = shared * (shared + 1) / 2 + sum(row.own * shared + row.own * (row.own + 1) / 2 for row in rows)
    return tokens + looks / (6 * hidden_size)


def num_tokens(rows: Iterable[RowSize]) -> int:
    """Return the tokens of a forward that holds these rows."""
    shared: dict[int, int] = {}
    own = 0
    for row in rows:
        shared[row.group] = row.shared
        own += row.own
    return own + sum(shared.values())


def tokens_of_rows(rows: Sequence[RowSize], num_rows: int) -> int:
    """Return the most tokens of a forward if each held `num_rows` rows, group mates side by side."""
    first_seen = _first_seen(rows)
    ordered = sorted(range(len(rows)), key=lambda i: (first_seen[rows[i].group], i))
    cut = [ordered[start : start + num_rows] for start in range(0, len(ordered), num_rows)]
    return max((num_tokens(rows[i] for i in part) for part in cut), default=0)


def plan_step(
    rows: Sequence[RowSize],
    num_ranks: int,
    max_tokens: int,
    hidden_size: float,
    homes: Sequence[int] | None = None,
) -> StepPlan:
    """Put every row into one forward of one rank.

    As few forwards as hold all rows; among these the costliest group goes first, to where least is to do yet. Forwards
    of similar cost stand at the same place of every rank, because the ranks meet there; the costliest come first.

    Args:
        rows: All rows of the step, over all ranks.
        num_ranks: Ranks that share the work.
        max_tokens: Most tokens of a forward. A larger row gets a forward of its own: it is too late to refuse it.
        hidden_size: Of the model; weighs attention against the linear layers. Infinite: tokens alone count.
        homes: The rank of each row, where rows may not change it.

    Returns:
        Equal arguments give equal plans, on every rank and in every run.
    """
    max_tokens = max(max_tokens, max((row.length for row in rows), default=0))
    if homes is not None:
        mine = [[i for i, home in enumerate(homes) if home == rank] for rank in range(num_ranks)]
        of_ranks = [_blocks(rows, part, max_tokens, hidden_size) for part in mine]
        num = max(len(_fill(part, 1, max_tokens)) for part in of_ranks)
        return _plan([_by_cost(_fill(part, num, max_tokens)) for part in of_ranks], max_tokens)
    blocks = _blocks(rows, range(len(rows)), max_tokens, hidden_size)
    best = plan_blocks(blocks, num_ranks, max_tokens)
    while num_ranks > 1 and best.imbalance > BALANCED:
        # Its costliest group stands in the way; in two halves it may not.
        largest = max((b for b in blocks if len(b.rows) > 1), key=lambda b: (b.cost, b.rows), default=None)
        if largest is None or largest.cost < sum(b.cost for b in blocks) / num_ranks * (BALANCED - 1):
            break
        blocks.remove(largest)
        blocks += [_block(rows, half, hidden_size) for half in halves(rows, largest.rows)]
        other = plan_blocks(blocks, num_ranks, max_tokens)
        best = min(best, other, key=lambda plan: max(plan.costs))
    return best


def plan_blocks(blocks: Sequence[RowBlock], num_ranks: int, max_tokens: int) -> StepPlan:
    """Put every block into one forward of one rank, as `plan_step` does.

    Raises:
        PackingError: a block is larger than `max_tokens`.
    """
    largest = max((block.tokens for block in blocks), default=0)
    if largest > max_tokens:
        raise PackingError(
            f"{largest} tokens that belong together do not fit into {max_tokens}. "
            f"Set max_tokens_per_forward to at least {largest}, or shorten the sequences."
        )
    forwards = _fill(blocks, num_ranks, max_tokens)
    while len(forwards) % num_ranks:
        forwards = _fill(blocks, len(forwards) + num_ranks - len(forwards) % num_ranks, max_tokens)
    return _plan(_deal(forwards, num_ranks), max_tokens)


def halves(rows: Sequence[RowSize], members: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two parts of a forward with about as many tokens each; the second is empty if there is one row.

    Args:
        rows: Sizes of all rows.
        members: Numbers of the rows of the forward.
    """
    first_seen = _first_seen([rows[i] for i in members])
    ordered = sorted(members, key=lambda i: (first_seen[rows[i].group], i))
    ends = np.cumsum([rows[i].own for i in ordered])
    cut = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    cut = min(cut, max(len(ordered) - 1, 1))
    return tuple(sorted(ordered[:cut])), tuple(sorted(ordered[cut:]))


def _first_seen(rows: Sequence[RowSize]) -> dict[int, int]:
    seen: dict[int, int] = {}
    for row in rows:
        seen.setdefault(row.group, len(seen))
    return seen


def _blocks(rows: Sequence[RowSize], members: Iterable[int], max_tokens: int, hidden_size: float) -> list[RowBlock]:
    """Return the groups; one that is over the budget in parts, each with its own copy of what it shares."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(rows[i].group, []).append(i)
    parts = [part for group in groups.values() for part in _within(rows, group, max_tokens)]
    return [_block(rows, part, hidden_size) for part in parts]


def _block(rows: Sequence[RowSize], members: Sequence[int], hidden_size: float) -> RowBlock:
    sizes = [rows[i] for i in members]
    return RowBlock(tuple(sorted(members)), num_tokens(sizes), forward_cost(sizes, hidden_size))


def _within(rows: Sequence[RowSize], group: list[int], max_tokens: int) -> list[list[int]]:
    """Cut a group by first fit, longest first: a long row that comes late would open a part of its own."""
    shared = rows[group[0]].shared
    if shared + sum(rows[i].own for i in group) <= max_tokens:
        return [group]
    parts: list[list[int]] = []
    used: list[int] = []
    for i in sorted(group, key=lambda i: (-rows[i].own, i)):
        place = next((p for p, tokens in enumerate(used) if tokens + rows[i].own <= max_tokens), None)
        if place is None:
            parts.append([i])
            used.append(shared + rows[i].own)
        else:
            parts[place].append(i)
            used[place] += rows[i].own
    return parts


def _fill(blocks: Sequence[RowBlock], at_least: int, max_tokens: int) -> list[list[RowBlock]]:
    """Return the fewest forwards that hold the blocks this way, `at_least` so many."""
    num = max(at_least, 1, -(-sum(block.tokens for block in blocks) // max_tokens))
    while True:
        forwards: list[list[RowBlock]] = [[] for _ in range(num)]
        room, load = np.full(num, max_tokens), np.zeros(num)
        for block in sorted(blocks, key=lambda b: (-b.cost, b.rows)):
            place = int(np.argmin(np.where(room >= block.tokens, load, np.inf)))
            if room[place] < block.tokens:
                break
            forwards[place].append(block)
            room[place] -= block.tokens
            load[place] += block.cost
        else:
            return forwards
        num += 1


def _by_cost(forwards: list[list[RowBlock]]) -> list[list[RowBlock]]:
    return sorted(forwards, key=lambda forward: (-_cost(forward), sorted(block.rows for block in forward)))


def _deal(forwards: list[list[RowBlock]], num_ranks: int) -> list[list[list[RowBlock]]]:
    """Costliest forwards first; of each turn the costliest goes to the rank that has least to do yet."""
    hands: list[list[list[RowBlock]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    ordered = _by_cost(forwards)
    for start in range(0, len(ordered), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
        for rank, forward in zip(ranks, ordered[start : start + num_ranks], strict=True):
            hands[rank].append(forward)
            load[rank] += _cost(forward)
    return hands


def _cost(forward: Iterable[RowBlock]) -> float:
    return sum(block.cost for block in forward)


def _plan(hands: list[list[list[RowBlock]]], max_tokens: int) -> StepPlan:
    return StepPlan(
        forwards=tuple(
            tuple(tuple(sorted(i for block in forward for i in block.rows)) for forward in hand) for hand in hands
        ),
        max_tokens=max_tokens,
        costs=tuple(sum(map(_cost, hand)) for hand in hands),
    )
