"""Plan the rows of an optimizer step over forwards and ranks. Integers only, no tensors.

Every rank plans the whole step and uses its part, so that ranks need not communicate. The plan balances the time of
forwards, not their tokens: attention grows with the square of a sequence. Rows of one group stay together, so that
their common prefix is forwarded once; the layout decides how they share it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trl_ext.errors import PackingError

# Slowest rank over the mean. Below it groups stay whole: a group on two ranks needs a second copy of its prompt.
BALANCED = 1.05

# Cost of a model call in addition to its tokens, in tokens: about 2,000 launches of 5 microseconds for the forward and
# backward of 32 layers, where an 8B model takes 40 microseconds per token (estimated).
CALL_COST = 256
# Factor on it if each call gathers all weights, forward and backward, at 200 GB/s (ZeRO-3; estimated).
GATHERED = 5


@dataclass(frozen=True, slots=True)
class RowSize:
    """Tokens of one row.

    Args:
        group: Rows with the same number begin with the same `shared` tokens.
        shared: Leading tokens that are forwarded once for the group's rows in a forward.
        own: Tokens after them, at least 1.
    """

    group: int
    shared: int
    own: int

    @property
    def length(self) -> int:
        return self.shared + self.own


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Forwards that use a prefix, which goes through the model once, before the first of them.

    Args:
        begin, end: Half-open range of the forwards' indices.
        groups: For every rank the group whose shared tokens are cached; None if the rank caches nothing there.
    """

    begin: int
    end: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The forwards of an optimizer step.

    Args:
        forwards: For every rank its forwards, each with the ascending numbers of its rows. Equally many on every rank,
            as the forwards of ZeRO-3 and DDP are collectives. A forward may be empty if there are few rows.
        max_tokens: Most tokens of a forward.
        costs: Of every rank, as in `forward_cost`.
        prefix_groups: Forwards that use cached prefixes, ascending.
    """

    forwards: tuple[tuple[tuple[int, ...], ...], ...]
    max_tokens: int
    costs: tuple[float, ...]
    prefix_groups: tuple[PrefixGroup, ...] = ()

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean; 1 without any cost."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0

    def largest(self, place: int) -> int:
        """Return the most rows that any rank has in its forward number `place`."""
        return max(len(forwards[place]) for forwards in self.forwards)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows that share a forward, such as the rows of a group; tokens and cost as if nothing else was in it."""

    rows: tuple[int, ...]
    tokens: int
    cost: float


def forward_cost(rows: Iterable[RowSize], hidden_size: float) -> float:
    """Return the cost of a forward of some rows, in units of one token through the linear layers.

    A token costs about 24 h**2 operations per layer in the linear layers (attention projections 8 h**2, a gated MLP
    16 h**2), and a query 4 h per key: the score, and its part of the sum of values. h is `hidden_size`. The shared
    tokens of a group are counted once.
    """
    tokens, looks, seen = 0, 0, set()
    for row in rows:
        begin = row.shared if row.group in seen else 0
        seen.add(row.group)
        tokens += row.length - begin
        looks += row.length * (row.length + 1) - begin * (begin + 1)
    return tokens + looks / 2 / (6 * hidden_size)


def num_tokens(rows: Iterable[RowSize]) -> int:
    """Return the tokens of a forward with these rows. Its layout may find more tokens to share."""
    shared: dict[int, int] = {}
    own = 0
    for row in rows:
        shared[row.group] = row.shared
        own += row.own
    return own + sum(shared.values())


def tokens_of_rows(rows: Sequence[RowSize], num_rows: int) -> int:
    """Return the most tokens of any forward if each has `num_rows` rows, with the rows of a group together."""
    first_seen: dict[int, int] = {}
    for row in rows:
        first_seen.setdefault(row.group, len(first_seen))
    ordered = sorted(rows, key=lambda row: first_seen[row.group])
    return max((num_tokens(ordered[i : i + num_rows]) for i in range(0, len(ordered), num_rows)), default=0)


def plan_step(
    rows: Sequence[RowSize],
    num_ranks: int,
    max_tokens: int,
    hidden_size: float,
    homes: Sequence[int] | None = None,
    caches: bool = False,
    gathers: bool = False,
) -> StepPlan:
    """Assign every row to one forward of one rank. Equal arguments give equal plans, on every rank and in every run.

    The plan has as few forwards as possible. The costliest group is placed first, each group where the load is lowest.
    Forwards at the same index have similar costs on all ranks, because the ranks wait for each other there; the
    costliest come first.

    Args:
        rows: All rows of the step, over all ranks.
        num_ranks: Ranks that share the work.
        max_tokens: Most tokens of a forward. A larger row gets a separate forward, as it is too late to reject it.
        hidden_size: The model's; it weights attention against the linear layers. If infinite, only tokens count.
        homes: The rank of each row, if rows may not change ranks.
        caches: Whether a group that does not fit one forward may be split into a cached prefix and several forwards.
            It is split if that takes less time.
        gathers: Whether each call of the model gathers its weights.
    """
    max_tokens = max(max_tokens, max((row.length for row in rows), default=0))
    plan = _balance(rows, num_ranks, max_tokens, hidden_size, homes)
    cached = _behind_prefixes(rows, num_ranks, max_tokens, hidden_size, homes) if caches and rows else None
    if cached is None:
        return plan
    call_cost = CALL_COST * (GATHERED if gathers else 1)
    return min((plan, cached), key=lambda one: _time(rows, one, hidden_size, call_cost))


def _balance(
    rows: Sequence[RowSize], num_ranks: int, max_tokens: int, hidden_size: float, homes: Sequence[int] | None
) -> StepPlan:
    """Return the plan without cached prefixes.

    Args:
        rows, num_ranks, max_tokens, hidden_size, homes: As in `plan_step`.
    """
    if homes is not None:
        members = [_at_home(homes, rank) for rank in range(num_ranks)]
        of_ranks = [_blocks(rows, own, max_tokens, hidden_size) for own in members]
        num = max(len(_fill(part, 1, max_tokens)) for part in of_ranks)
        return _plan([_by_cost(_fill(part, num, max_tokens)) for part in of_ranks], max_tokens)
    blocks = _blocks(rows, range(len(rows)), max_tokens, hidden_size)
    best = plan_blocks(blocks, num_ranks, max_tokens)
    while num_ranks > 1 and best.imbalance > BALANCED:
        # The costliest group may prevent a balance: try it in two halves.
        largest = max((b for b in blocks if len(b.rows) > 1), key=lambda b: (b.cost, b.rows), default=None)
        if largest is None or largest.cost < sum(b.cost for b in blocks) / num_ranks * (BALANCED - 1):
            break
        blocks.remove(largest)
        blocks += [_block(rows, half, hidden_size) for half in halves(rows, largest.rows)]
        other = plan_blocks(blocks, num_ranks, max_tokens)
        best = min(best, other, key=lambda plan: max(plan.costs))
    return best


def plan_blocks(blocks: Sequence[RowBlock], num_ranks: int, max_tokens: int) -> StepPlan:
    """Assign every block to one forward of one rank, as `plan_step` does.

    Raises:
        PackingError: A block is larger than `max_tokens`.
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
    # Deal forwards to ranks, costliest first; in each round the costliest goes to the rank with the lowest load.
    per_rank: list[list[list[RowBlock]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    ordered = _by_cost(forwards)
    for start in range(0, len(ordered), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
        for rank, forward in zip(ranks, ordered[start : start + num_ranks], strict=True):
            per_rank[rank].append(forward)
            load[rank] += _cost(forward)
    return _plan(per_rank, max_tokens)


def halves(rows: Sequence[RowSize], members: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a forward's rows `members` into two parts of similar tokens; the second is empty if there is one row."""
    ordered = sorted(members, key=lambda i: (rows[i].shared, rows[i].group, i))
    # Tokens that each row adds to the row before it; the first row adds only its own if all share one prefix.
    beside = [ordered[-1], *ordered[:-1]]
    are_mates = [rows[i].group == rows[j].group for i, j in zip(ordered, beside, strict=True)]
    ends = np.cumsum(
        [rows[i].own if is_mate else rows[i].length for i, is_mate in zip(ordered, are_mates, strict=True)]
    )
    cut = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    cut = min(cut, max(len(ordered) - 1, 1))
    return tuple(sorted(ordered[:cut])), tuple(sorted(ordered[cut:]))


def _groups(rows: Sequence[RowSize], members: Iterable[int]) -> list[list[int]]:
    """Return the members by groups, in the order of their first rows; rows that share nothing are single."""
    groups: dict[Any, list[int]] = {}
    for i in members:
        groups.setdefault(rows[i].group if rows[i].shared else (i,), []).append(i)
    return list(groups.values())


def _blocks(rows: Sequence[RowSize], members: Iterable[int], max_tokens: int, hidden_size: float) -> list[RowBlock]:
    """Return the groups of some rows; groups that do not fit are cut, each part with a copy of the shared tokens.

    Args:
        rows: All rows.
        members: Numbers of the rows to group.
        max_tokens: Most tokens of a group.
        hidden_size: As in `plan_step`.
    """
    parts = [part for group in _groups(rows, members) for part in _cut(rows, group, max_tokens)]
    return [_block(rows, part, hidden_size) for part in parts]


def _block(rows: Sequence[RowSize], members: Sequence[int], hidden_size: float) -> RowBlock:
    sizes = [rows[i] for i in members]
    return RowBlock(tuple(sorted(members)), num_tokens(sizes), forward_cost(sizes, hidden_size))


def _cut(rows: Sequence[RowSize], group: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut a group by first fit, longest row first: a long row that comes late would open another part."""
    parts: list[tuple[int, list[int]]] = []  # tokens, rows
    for i in sorted(group, key=lambda i: (-rows[i].own, i)):
        place = next((p for p, (tokens, _) in enumerate(parts) if tokens + rows[i].own <= max_tokens), None)
        if place is None:
            parts.append((rows[i].length, [i]))
        else:
            tokens, part = parts[place]
            parts[place] = tokens + rows[i].own, [*part, i]
    return [part for _, part in parts]


def _fill(blocks: Sequence[RowBlock], at_least: int, max_tokens: int) -> list[list[RowBlock]]:
    """Distribute the blocks over as few forwards as this method needs, `at_least` as many as given.

    Where blocks are left over, the next try has as many more forwards as their tokens fill: a try more for each
    forward would make the time of a large step grow with the square of its rows.
    """
    num = max(at_least, 1, -(-sum(block.tokens for block in blocks) // max_tokens))
    ordered = sorted(blocks, key=lambda b: (-b.cost, b.rows))
    while True:
        forwards: list[list[RowBlock]] = [[] for _ in range(num)]
        room, load = np.full(num, max_tokens), np.zeros(num)
        left_tokens = 0
        for block in ordered:
            place = int(np.where(room >= block.tokens, load, np.inf).argmin())
            if room[place] < block.tokens:
                left_tokens += block.tokens
                continue
            forwards[place].append(block)
            room[place] -= block.tokens
            load[place] += block.cost
        if not left_tokens:
            return forwards
        num += max(left_tokens // max_tokens, 1)


@dataclass(slots=True)
class _RankPlan:
    """The forwards of one rank while a plan with cached prefixes is made; a forward is a list of row numbers.

    Args:
        split: Groups that no forward can hold, each in parts; most parts come first.
        others: Forwards of all other rows, the costliest first.
        forwards: Planned so far.
    """

    split: list[list[list[int]]]
    others: list[list[int]]
    forwards: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[RowSize], members: Iterable[int], max_tokens: int, hidden_size: float) -> "_RankPlan":
        """Cut the groups of a rank's rows that do not fit, and put the others into forwards.

        Args:
            rows: All rows.
            members: Numbers of this rank's rows.
            max_tokens, hidden_size: As in `plan_step`.
        """
        split, blocks = [], []
        for group in _groups(rows, members):
            parts = _cut(rows, group, max_tokens)
            if len(parts) > 1:
                split.append(parts)
            else:
                blocks.append(_block(rows, parts[0], hidden_size))
        split.sort(key=lambda parts: -len(parts))
        filled = _by_cost(_fill(blocks, 1, max_tokens)) if blocks else []
        return cls(split, [list(_rows_of(forward)) for forward in filled])

    def parts(self, place: int) -> list[list[int]]:
        """Return the parts of a group that is split; empty if this rank has fewer such groups."""
        return self.split[place] if place < len(self.split) else []

    def add(self, parts: list[list[int]], num_forwards: int) -> None:
        """Plan as many forwards: these parts, or others that wait if there are none, and empty ones for the rest."""
        if not parts:
            parts, self.others = self.others[:num_forwards], self.others[num_forwards:]
        self.forwards += parts
        for _ in range(num_forwards - len(parts)):
            self.forwards.append([])


def _behind_prefixes(
    rows: Sequence[RowSize], num_ranks: int, max_tokens: int, hidden_size: float, homes: Sequence[int] | None
) -> StepPlan | None:
    """Return a plan in which each rank forwards a group's prefix once for all its forwards; None if all groups fit.

    The cached tokens count towards the budget of each forward that uses them, since their activations exist there too.

    Args:
        rows, num_ranks, max_tokens, hidden_size, homes: As in `plan_step`.
    """
    if homes is None:  # assign rows to ranks as if a forward could hold everything
        whole = _balance(rows, num_ranks, sum(row.length for row in rows), hidden_size, None)
        of_ranks = [forward for (forward,) in whole.forwards]
    else:
        of_ranks = [_at_home(homes, rank) for rank in range(num_ranks)]
    ranks = [_RankPlan.of(rows, members, max_tokens, hidden_size) for members in of_ranks]
    prefix_groups = []
    for place in range(max(len(rank.split) for rank in ranks)):
        num_forwards = max(len(rank.parts(place)) for rank in ranks)
        begin = len(ranks[0].forwards)
        groups = []
        for rank in ranks:
            parts = rank.parts(place)
            rank.add(parts, num_forwards)
            groups.append(rows[parts[0][0]].group if parts else None)
        prefix_groups.append(PrefixGroup(begin, begin + num_forwards, tuple(groups)))
    if not prefix_groups:
        return None
    num_left = max(len(rank.others) for rank in ranks)
    for rank in ranks:
        rank.add([], num_left)
    forwards = tuple(tuple(map(_ascending, rank.forwards)) for rank in ranks)
    plan = StepPlan(forwards, max_tokens, (), tuple(prefix_groups))
    return replace(plan, costs=tuple(sum(_costs(rows, plan, rank, hidden_size)) for rank in range(num_ranks)))


def _at_home(homes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the numbers of the rows that stay on a rank."""
    return tuple(i for i, home in enumerate(homes) if home == rank)


def _ascending(forward: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(forward))


def _rows_of(forward: Iterable[RowBlock]) -> tuple[int, ...]:
    """Return the ascending numbers of a forward's rows."""
    return _ascending(i for block in forward for i in block.rows)


def _costs(rows: Sequence[RowSize], plan: StepPlan, rank: int, hidden_size: float) -> list[float]:
    """Return the cost of every forward of a rank, then of every prefix that it caches.

    Args:
        rows: All rows.
        plan: The plan.
        rank: Of the forwards.
        hidden_size: As in `plan_step`.
    """
    costs, prefixes = [], []
    for forward in plan.forwards[rank]:
        costs.append(forward_cost([rows[i] for i in forward], hidden_size))
    for group in plan.prefix_groups:
        first = plan.forwards[rank][group.begin][:1] if group.groups[rank] is not None else ()
        prefix = sum(forward_cost([RowSize(0, 0, rows[i].shared)], hidden_size) for i in first)
        prefixes.append(prefix)
        for place in range(group.begin, group.end):
            costs[place] -= prefix if plan.forwards[rank][place] else 0
    return costs + prefixes


def _time(rows: Sequence[RowSize], plan: StepPlan, hidden_size: float, call_cost: float) -> float:
    """Return the duration of a plan in units of a token: all ranks wait for each other in every call of the model.

    Args:
        rows: All rows.
        plan: The plan.
        hidden_size: As in `plan_step`.
        call_cost: Of a call of the model, in tokens.
    """
    costs = [_costs(rows, plan, rank, hidden_size) for rank in range(len(plan.forwards))]
    return sum(max(at_place) + call_cost for at_place in zip(*costs, strict=True))


def _by_cost(forwards: list[list[RowBlock]]) -> list[list[RowBlock]]:
    return sorted(forwards, key=lambda forward: (-_cost(forward), sorted(block.rows for block in forward)))


def _cost(forward: Iterable[RowBlock]) -> float:
    return sum(block.cost for block in forward)


def _plan(per_rank: list[list[list[RowBlock]]], max_tokens: int) -> StepPlan:
    return StepPlan(
        forwards=tuple(tuple(map(_rows_of, own)) for own in per_rank),
        max_tokens=max_tokens,
        costs=tuple(sum(map(_cost, own)) for own in per_rank),
    )
