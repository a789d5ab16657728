"""Which rows of an optimizer step go through the model in which forward, on which rank. Integers only, no tensors.

Every rank plans the whole step and takes its own part, so that no rank has to ask another one. What is balanced is the
time of a forward, not its tokens: attention grows with the square of a sequence. Rows of one group stay together, so
that what they share is forwarded once; how they share it is the layout's business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trl_ext.errors import PackingError
from trl_ext.packing.trie import Node, RowSize, grow, spans

# Slowest over mean rank: below it groups stay whole. A group that two ranks have costs a second copy of its prompt.
BALANCED = 1.05

# What a call of the model costs beside its tokens, in tokens: about 2,000 launches of 5 microseconds for the forward
# and backward of 32 layers, where an 8B model takes 40 microseconds a token (estimated).
CALL_COST = 256
# So many times as much where each call gathers all weights, forward and backward, at 200 GB/s (ZeRO-3; estimated).
GATHERED = 5


@dataclass(frozen=True, slots=True)
class Stretch:
    """Forwards behind a prefix that goes through the model once, before the first of them.

    Args:
        begin, end: Their places, a half-open range.
        groups: Of every rank the group whose shared tokens are kept; None: its forwards there are as all others.
    """

    begin: int
    end: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The forwards of an optimizer step.

    Args:
        forwards: For every rank its forwards, each the row numbers that it holds, ascending. Equally many on every
            rank: the forwards of ZeRO-3 and DDP are collectives. May be empty where there are fewer rows than places.
        max_tokens: Most tokens of a forward.
        costs: Of every rank, as in `forward_cost`.
        stretches: Forwards behind prefixes that are kept for them, ascending.
    """

    forwards: tuple[tuple[tuple[int, ...], ...], ...]
    max_tokens: int
    costs: tuple[float, ...]
    stretches: tuple[Stretch, ...] = ()

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
    """Cost of a forward of some rows, in units of one token through the linear layers.

    A token costs about 24 h**2 operations a layer in the linear layers (attention projections 8 h**2, a gated MLP
    16 h**2), a query that looks at a key 4 h: scores and their sum over the values.

    Args:
        rows: What they begin with in common is forwarded once.
        hidden_size: h.
    """
    segments = spans(rows, range(len(rows)))
    tokens = sum(end - start for start, end in segments)
    looks = sum(end * (end + 1) - start * (start + 1) for start, end in segments) / 2
    return tokens + looks / (6 * hidden_size)


def num_tokens(rows: Iterable[RowSize]) -> int:
    """Return the tokens of a forward that holds these rows."""
    rows = list(rows)
    return sum(end - start for start, end in spans(rows, range(len(rows))))


def tokens_of_rows(rows: Sequence[RowSize], num_rows: int) -> int:
    """Return the most tokens of a forward if each held `num_rows` rows, group mates side by side.

    What rows of a group share beyond what all of them share is counted for each: none may share more in a later step.
    """
    first_seen: dict[int, int] = {}
    for row in rows:
        first_seen.setdefault(row.group, len(first_seen))
    ordered = sorted(rows, key=lambda row: first_seen[row.group])
    cut = [ordered[start : start + num_rows] for start in range(0, len(ordered), num_rows)]
    return max((num_tokens(replace(row, forks=None) for row in part) for part in cut), default=0)


def plan_step(
    rows: Sequence[RowSize],
    num_ranks: int,
    max_tokens: int,
    hidden_size: float,
    homes: Sequence[int] | None = None,
    keeps: bool = False,
    gathers: bool = False,
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
        keeps: Whether a group that does not fit one forward may go through the model as a prefix, which is kept, and
            several forwards behind it. It does where that takes less time.
        gathers: Whether each call of the model gathers its weights.

    Returns:
        Equal arguments give equal plans, on every rank and in every run.
    """
    longest = max((row.length for row in rows), default=0)
    max_tokens = max(max_tokens, longest)
    if keeps:
        plan = plan_step(rows, num_ranks, max_tokens, hidden_size, homes)
        kept = _keeping(rows, num_ranks, max_tokens, hidden_size, homes)
        call_cost = CALL_COST * (GATHERED if gathers else 1)
        return plan if kept is None else min((plan, kept), key=lambda one: _time(rows, one, hidden_size, call_cost))
    plan = _planned(rows, num_ranks, max_tokens, hidden_size, homes)
    # Blocks that meet in a forward may be worth other segments than each by itself; hardly ever they take more tokens.
    most = max((num_tokens(rows[i] for i in forward) for hand in plan.forwards for forward in hand), default=0)
    if most <= max_tokens or max_tokens == longest:
        return plan
    return plan_step(rows, num_ranks, 2 * max_tokens - most, hidden_size, homes)


def _planned(
    rows: Sequence[RowSize], num_ranks: int, max_tokens: int, hidden_size: float, homes: Sequence[int] | None
) -> StepPlan:
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
        parts = [part for half in halves(rows, largest.rows) for part in _fitting(rows, half, max_tokens)]
        blocks += [_block(rows, part, hidden_size) for part in parts]
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
    ordered = sorted(members, key=lambda i: (rows[i].beginnings, i))
    # What each row adds to the one before, the first one to what all of them share.
    beside = [ordered[-1], *ordered[:-1]]
    ends = np.cumsum([rows[i].length - _num_common(rows[i], rows[j]) for i, j in zip(ordered, beside, strict=True)])
    cut = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    cut = min(cut, max(len(ordered) - 1, 1))
    return tuple(sorted(ordered[:cut])), tuple(sorted(ordered[cut:]))


def _num_common(one: RowSize, other: RowSize) -> int:
    """Return how many tokens two rows begin with in common, as far as their forks tell."""
    together = (fork for fork, of_other in zip(one.beginnings, other.beginnings, strict=False) if fork == of_other)
    return max((tokens for tokens, _ in together), default=0)


def _blocks(rows: Sequence[RowSize], members: Iterable[int], max_tokens: int, hidden_size: float) -> list[RowBlock]:
    """Return the rows that had better share a forward; too many of them in parts, each with a copy of what it shares.

    A beginning whose copies would be few beside all tokens, such as a short system prompt, leaves its rows free.
    """
    parts: list[Sequence[int]] = []
    waiting = [grow(rows, members)]
    while waiting:
        node = waiting.pop()
        parts += [[i] for i in node.members]
        for child in node.children:
            below = _within(rows, child, max_tokens)
            copies = (len(child.members) + len(child.children) - 1) * child.depth
            if child.is_of_group or copies > (BALANCED - 1) * sum(num_tokens(rows[i] for i in part) for part in below):
                parts += below
            else:
                waiting.append(child)
    return [_block(rows, part, hidden_size) for part in parts]


def _block(rows: Sequence[RowSize], members: Sequence[int], hidden_size: float) -> RowBlock:
    sizes = [rows[i] for i in members]
    return RowBlock(tuple(sorted(members)), num_tokens(sizes), forward_cost(sizes, hidden_size))


def _within(rows: Sequence[RowSize], root: Node, max_tokens: int) -> list[Sequence[int]]:
    """Cut the rows below a node by first fit, longest first: a long row that comes late would open a part of its own.

    What parts of one node share is cut last: from the leaves up, each node's parts are put together where they fit.
    """
    nodes = [root]
    for node in nodes:
        nodes += node.children
    parts: dict[Node, list[tuple[int, list[int]]]] = {}  # of each node: tokens after its end, rows
    for node in reversed(nodes):
        pieces = [(rows[i].length - node.depth, [i]) for i in node.members]
        for child in node.children:
            pieces += [(tokens + child.depth - node.depth, part) for tokens, part in parts.pop(child)]
        bins: list[tuple[int, list[int]]] = []
        for tokens, part in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
            fits = (p for p, (used, _) in enumerate(bins) if node.depth + used + tokens <= max_tokens)
            place = next(fits, None)
            if place is None:
                bins.append((tokens, part))
            else:
                bins[place] = bins[place][0] + tokens, bins[place][1] + part
        parts[node] = bins
    return [half for _, part in parts[root] for half in _fitting(rows, part, max_tokens)]


def _fitting(rows: Sequence[RowSize], part: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """Return a part, or halves of it while they have too many tokens: among few rows less is worth a segment."""
    if num_tokens(rows[i] for i in part) <= max_tokens:
        return [part]
    return [one for half in halves(rows, part) for one in _fitting(rows, half, max_tokens)]


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


def _keeping(
    rows: Sequence[RowSize], num_ranks: int, max_tokens: int, hidden_size: float, homes: Sequence[int] | None
) -> StepPlan | None:
    """Return a plan where a rank forwards what a group shares once, however many forwards the group takes.

    The tokens that are kept count towards those of each forward behind them, since their activations are there as
    well. None where all groups fit a forward.
    """
    if not rows:
        return None
    if homes is None:  # as though a forward held everything
        whole = plan_step(rows, num_ranks, sum(row.length for row in rows), hidden_size)
        mine = [forward for (forward,) in whole.forwards]
    else:
        mine = [tuple(i for i, home in enumerate(homes) if home == rank) for rank in range(num_ranks)]
    cut: list[list[list[Sequence[int]]]] = []  # of every rank its groups that do not fit, each in parts
    others: list[list[Sequence[int]]] = []
    for members in mine:
        groups: dict[int, list[int]] = {}
        for i in members:
            groups.setdefault(rows[i].group, []).append(i)
        parts = [_within(rows, grow(rows, group), max_tokens) for group in groups.values()]
        of_rank = [part for part in parts if len(part) > 1 and rows[part[0][0]].shared]
        cut.append(sorted(of_rank, key=lambda part: -len(part)))
        rest = [_block(rows, one, hidden_size) for part in parts if part not in of_rank for one in part]
        filled = _by_cost(_fill(rest, 1, max_tokens)) if rest else []
        others.append([[i for block in forward for i in block.rows] for forward in filled])
    full = max((num_tokens(rows[i] for i in forward) for of_rank in others for forward in of_rank), default=0)
    if not any(cut) or full > max_tokens:
        return None
    forwards: list[list[Sequence[int]]] = [[] for _ in mine]
    stretches = []
    for k in range(max(map(len, cut))):
        length = max(len(of_rank[k]) for of_rank in cut if k < len(of_rank))
        begin = len(forwards[0])
        for rank, hand in enumerate(forwards):
            if k < len(cut[rank]):
                hand += cut[rank][k]
            else:
                hand += others[rank][:length]
                del others[rank][:length]
            hand += [[] for _ in range(begin + length - len(hand))]
        kept = tuple(rows[of_rank[k][0][0]].group if k < len(of_rank) else None for of_rank in cut)
        stretches.append(Stretch(begin, begin + length, kept))
    length = max(map(len, others))
    for hand, rest_of_rank in zip(forwards, others, strict=True):
        hand += [*rest_of_rank, *([] for _ in range(length - len(rest_of_rank)))]
    plan = StepPlan(
        tuple(tuple(tuple(sorted(forward)) for forward in hand) for hand in forwards), max_tokens, (), tuple(stretches)
    )
    return replace(plan, costs=tuple(sum(_costs(rows, plan, rank, hidden_size)) for rank in range(num_ranks)))


def _costs(rows: Sequence[RowSize], plan: StepPlan, rank: int, hidden_size: float) -> list[float]:
    """Return the cost of every forward of a rank, and of every prefix that it keeps."""
    costs, prefixes = [], []
    for forward in plan.forwards[rank]:
        costs.append(forward_cost([rows[i] for i in forward], hidden_size))
    for stretch in plan.stretches:
        first = plan.forwards[rank][stretch.begin][:1] if stretch.groups[rank] is not None else ()
        prefix = sum(forward_cost([RowSize(0, 0, rows[i].shared)], hidden_size) for i in first)
        prefixes.append(prefix)
        for place in range(stretch.begin, stretch.end):
            costs[place] -= prefix if plan.forwards[rank][place] else 0
    return costs + prefixes


def _time(rows: Sequence[RowSize], plan: StepPlan, hidden_size: float, call_cost: float) -> float:
    """Return how long a plan takes, in units of a token: ranks meet in every call of the model."""
    costs = [_costs(rows, plan, rank, hidden_size) for rank in range(len(plan.forwards))]
    return sum(max(at_place) + call_cost for at_place in zip(*costs, strict=True))


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
