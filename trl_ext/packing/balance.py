"""Spread things of different size over the forwards of all ranks. Integers only, no tensors.

Every rank plans the whole optimizer step and takes its own part, so that no rank has to ask another one. What is
balanced is the time of a forward, not its tokens: attention grows with the square of a sequence.
"""

from collections.abc import Sequence

from trl_ext.errors import PackingError
from trl_ext.packing.plan import Item


def forward_cost(items: Sequence[Item], hidden_size: int) -> float:
    """Cost of a group's forward in units of one token through the linear layers.

    A token costs about 24 h**2 operations a layer in the linear layers (attention projections 8 h**2, a gated MLP
    16 h**2), a query that looks at a key 4 h: scores and their sum over the values.

    Args:
        items: Members of one group; what they share is forwarded once.
        hidden_size: h.
    """
    shared = items[0].shared
    tokens = shared + sum(item.own for item in items)
    looks = shared * (shared + 1) / 2 + sum(item.own * shared + item.own * (item.own + 1) / 2 for item in items)
    return tokens + looks / (6 * hidden_size)


def spread(
    tokens: Sequence[int], costs: Sequence[float], num_ranks: int, max_tokens: int, least_rows: int = 1
) -> list[list[list[int]]]:
    """Put every thing into one row of one rank, with equally many rows on every rank.

    As few rows as hold them all; among these the costliest thing goes first, into the cheapest row that has room. Rows
    of similar cost stand at the same place of every rank, because the ranks meet at every forward.

    Args:
        tokens, costs: Of every thing.
        num_ranks: Ranks that share the work.
        max_tokens: Most tokens of a row.
        least_rows: Fewest rows of a rank.

    Returns:
        For every rank its rows, each a list of indices in ascending order. Rows may be empty where there are fewer
        things than rows.

    Raises:
        PackingError: a thing alone is larger than `max_tokens`.
    """
    if tokens and max(tokens) > max_tokens:
        raise PackingError(
            f"{max(tokens)} tokens that belong together do not fit into {max_tokens}. "
            f"Set max_tokens_per_forward to at least {max(tokens)}, or shorten the sequences."
        )
    num_rows = max(least_rows, -(-sum(tokens) // (max_tokens * num_ranks)))
    while (rows := _fill(tokens, costs, num_rows * num_ranks, max_tokens)) is None:
        num_rows += 1
    return _deal(rows, costs, num_ranks)


def _fill(tokens: Sequence[int], costs: Sequence[float], num_rows: int, max_tokens: int) -> list[list[int]] | None:
    """The things in `num_rows` rows, None if they do not fit this way."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [max_tokens] * num_rows
    load = [0.0] * num_rows
    for i in sorted(range(len(tokens)), key=lambda i: (-costs[i], i)):
        fitting = [row for row in range(num_rows) if room[row] >= tokens[i]]
        if not fitting:
            return None
        row = min(fitting, key=lambda row: (load[row], row))
        rows[row].append(i)
        room[row] -= tokens[i]
        load[row] += costs[i]
    return [sorted(row) for row in rows]


def _deal(rows: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Costliest rows first, to each rank in turn and back again, so that no rank always gets the larger one."""
    ordered = sorted(rows, key=lambda row: (-sum(costs[i] for i in row), row))
    hands: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for place in range(0, len(ordered), num_ranks):
        turn = ordered[place : place + num_ranks]
        for rank, row in enumerate(turn if (place // num_ranks) % 2 == 0 else reversed(turn)):
            hands[rank].append(row)
    return hands
