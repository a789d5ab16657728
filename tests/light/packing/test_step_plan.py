"""The rows of an optimizer step, planned over the forwards of all ranks."""

import random
from itertools import chain, pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.errors import PackingError
from trl_ext.packing import step_plan
from trl_ext.packing.step_plan import (
    RowBlock,
    RowSize,
    forward_cost,
    halves,
    num_tokens,
    plan_blocks,
    plan_step,
    tokens_of_rows,
)

HIDDEN_SIZE = 896
MAX_TOKENS = 8192


def pairs(count: int, seed: int = 0) -> list[tuple[RowSize, RowSize]]:
    """Lengths with a long tail, as those of chats: half of the prompts are below 150 tokens, a few beyond 1500."""
    draw = random.Random(seed)

    def length(median: int, most: int) -> int:
        return min(int(median * draw.lognormvariate(0, 0.9)) + 1, most)

    drawn = [(length(150, 2000), length(200, 1000), length(200, 1000)) for _ in range(count)]
    return [(RowSize(0, shared, chosen), RowSize(0, shared, rejected)) for shared, chosen, rejected in drawn]


LENGTHS = st.tuples(st.integers(1, 2000), st.integers(1, 1000), st.integers(1, 1000))
PAIRS = st.lists(
    LENGTHS.map(lambda sizes: (RowSize(0, sizes[0], sizes[1]), RowSize(0, sizes[0], sizes[2]))), max_size=64
)


def sizes(drawn: list[tuple[RowSize, RowSize]]) -> tuple[list[int], list[float]]:
    tokens = [num_tokens((chosen, rejected)) for chosen, rejected in drawn]
    return tokens, [forward_cost(pair, HIDDEN_SIZE) for pair in drawn]


def spread(tokens, costs, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """[rank][forward] numbers of the things in it."""
    blocks = [RowBlock((i,), *of) for i, of in enumerate(zip(tokens, costs, strict=True))]
    return [[list(rows) for rows in forwards] for forwards in plan_blocks(blocks, num_ranks, max_tokens).forwards]


def costs_of(ranks: list[list[list[int]]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in row) for rows in ranks for row in rows]


def dealt_by_count(count: int, num_rows: int) -> list[list[list[int]]]:
    """Equally many things in every row: what a batch size does."""
    return [[list(range(row, count, num_rows)) for row in range(num_rows)]]


@given(PAIRS, st.sampled_from([1, 2, 3, 8]), st.integers(4000, 9000))
def test_every_thing_lands_in_one_row_within_the_budget_and_ranks_have_equally_many(drawn, num_ranks, max_tokens):
    tokens, costs = sizes(drawn)
    ranks = spread(tokens, costs, num_ranks, max_tokens)
    rows = list(chain.from_iterable(ranks))
    assert sorted(chain.from_iterable(rows)) == list(range(len(drawn)))
    assert max(sum(tokens[i] for i in row) for row in rows) <= max_tokens
    assert len(ranks) == num_ranks
    assert len({len(rows) for rows in ranks}) == 1
    assert all(row == sorted(row) for row in rows)
    assert ranks == spread(tokens, costs, num_ranks, max_tokens)  # every rank plans for itself what all ranks do


def test_there_are_as_few_rows_as_hold_everything():
    for tokens, num_ranks, num_rows in (
        ([5, 5], 1, 1),
        ([6, 5], 1, 2),
        ([10] * 6, 1, 6),
        ([10] * 6, 2, 3),
        ([10] * 7, 2, 4),
        ([5] * 8, 2, 2),
        ([7, 3, 6, 4, 5, 5], 1, 3),
        ([1] * 30, 3, 1),
    ):
        assert [len(rows) for rows in spread(tokens, tokens, num_ranks, max_tokens=10)] == [num_rows] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_ragged_step_takes_at_most_one_row_of_a_rank_more_than_its_tokens_need(num_ranks):
    for seed in range(5):
        tokens, costs = sizes(pairs(256, seed))
        rows = len(spread(tokens, costs, num_ranks, MAX_TOKENS)[0])
        assert rows <= -(-sum(tokens) // (MAX_TOKENS * num_ranks)) + 1, f"seed {seed}"


def test_the_budget_is_kept_exactly_a_thing_over_it_refused_and_equal_things_are_dealt_evenly():
    ranks = spread([5] * 12, [1.0] * 12, 3, 10)
    assert [[len(row) for row in rows] for rows in ranks] == [[2, 2]] * 3
    with pytest.raises(PackingError, match=r"12 tokens .* do not fit into 10\. .*at least 12"):
        spread([3, 12, 4], [3, 12, 4], 2, 10)
    assert spread([10], [10.0], 1, 10) == [[[0]]]
    assert sorted(spread([4, 6], [4, 6], 4, 10)) == [[[]], [[]], [[0]], [[1]]]
    assert spread([], [], 3, 10) == [[[]], [[]], [[]]]


def test_the_costliest_row_is_near_the_mean_and_cheaper_than_when_things_are_dealt_by_count():
    for seed in range(10):
        tokens, costs = sizes(pairs(256, seed))
        ours = costs_of(spread(tokens, costs, 8, MAX_TOKENS), costs)
        assert max(ours) <= 1.05 * mean(ours), f"seed {seed}"
        by_count = costs_of(dealt_by_count(256, len(ours)), costs)
        assert max(ours) < 0.9 * max(by_count), f"seed {seed}"


def test_the_ranks_rows_at_the_same_place_cost_alike():
    """The ranks meet at every forward, so that the slowest row of a place sets its time."""
    tokens, costs = sizes(pairs(256))
    ranks = spread(tokens, costs, 4, MAX_TOKENS)
    places = [costs_of([list(rows)], costs) for rows in zip(*ranks, strict=True)]
    assert len(places) > 1
    assert all(min(earlier) >= max(later) for earlier, later in pairwise(places))


# Rows of groups -----------------------------------------------------------------------------------------------------


def rollouts(num_groups: int, size: int = 8, seed: int = 0, sigma: float = 0.8) -> list[RowSize]:
    """Groups of completions with log-normal lengths behind one prompt each."""
    draw = random.Random(seed)
    prompts = [int(200 * draw.lognormvariate(0, 0.5)) + 1 for _ in range(num_groups)]
    return [
        RowSize(group, prompts[group], min(int(400 * draw.lognormvariate(0, sigma)) + 1, 8000))
        for group in range(num_groups)
        for _ in range(size)
    ]


GROUPED = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.integers(1, 500), min_size=1, max_size=6)), max_size=12
).map(lambda groups: [RowSize(g, shared, own) for g, (shared, owns) in enumerate(groups) for own in owns])


@given(GROUPED, st.sampled_from([1, 2, 3, 8]), st.integers(1, 2000), st.booleans())
def test_every_row_lands_in_one_forward_within_the_budget(rows, num_ranks, max_tokens, stays):
    homes = [i % num_ranks for i in range(len(rows))] if stays else None
    plan = plan_step(rows, num_ranks, max_tokens, HIDDEN_SIZE, homes)
    forwards = [forward for rank in plan.forwards for forward in rank]
    assert sorted(chain.from_iterable(forwards)) == list(range(len(rows)))
    assert len({len(rank) for rank in plan.forwards}) == 1
    # A row larger than the budget gets a forward of its own.
    longest = max((row.shared + row.own for row in rows), default=0)
    assert all(num_tokens(rows[i] for i in forward) <= max(max_tokens, longest) for forward in forwards)
    if homes is not None:
        assert all(homes[i] == rank for rank, of in enumerate(plan.forwards) for i in chain.from_iterable(of))


def test_group_mates_share_a_forward_while_it_has_room_and_one_rank_would_not_wait_for_them():
    plan = plan_step(rollouts(6), 1, 20_000, HIDDEN_SIZE)
    of_row = {i: k for k, forward in enumerate(plan.forwards[0]) for i in forward}
    assert all(len({of_row[i] for i in range(g * 8, g * 8 + 8)}) == 1 for g in range(6))
    rows = [RowSize(0, 100, 500)] * 8 + [RowSize(1, 100, 5)] * 8
    plan = plan_step(rows, 2, 10_000, 2048)
    assert plan.imbalance <= 1.1
    assert all(any(i < 8 for forward in rank for i in forward) for rank in plan.forwards)


@pytest.mark.parametrize("num_groups", [16, 32, 64, 256])
def test_the_slowest_rank_is_near_the_mean(num_groups):
    for seed in range(5):
        rows = rollouts(num_groups, seed=seed)
        plan = plan_step(rows, 8, tokens_of_rows(rows, 8), 2048)
        assert plan.imbalance <= 1.05, f"seed {seed}"


def test_without_a_budget_no_forward_is_larger_than_a_micro_batch_of_group_mates():
    rows = rollouts(4)
    mates = max(num_tokens(rows[start : start + 4]) for start in range(0, len(rows), 4))
    assert tokens_of_rows(rows, 4) == mates
    shuffled = random.Random(0).sample(rows, len(rows))
    assert tokens_of_rows(shuffled, 4) >= max(num_tokens(shuffled[i : i + 1]) for i in range(len(rows)))


@given(GROUPED.filter(bool))
def test_halves_are_a_forward_in_two(rows):
    first, second = halves(rows, range(len(rows)))
    assert sorted(first + second) == list(range(len(rows)))
    assert first
    assert bool(second) == (len(rows) > 1)


def test_halves_have_about_as_many_tokens():
    rows = rollouts(4)
    first, second = ([rows[i].own for i in half] for half in halves(rows, range(len(rows))))
    assert abs(sum(first) - sum(second)) <= 2 * max(first + second)


# Cost -------------------------------------------------------------------------------------------------------------


def test_a_token_costs_itself_and_its_looks_and_sharing_saves_both():
    assert forward_cost([RowSize(0, 0, 1)], hidden_size=100) == pytest.approx(1 + 1 / 600)
    shared = forward_cost([RowSize(0, 30, 10), RowSize(0, 30, 5)], HIDDEN_SIZE)
    apart = sum(forward_cost([RowSize(0, 0, own)], HIDDEN_SIZE) for own in (40, 35))
    assert shared == pytest.approx(apart - forward_cost([RowSize(0, 0, 30)], HIDDEN_SIZE))
    assert forward_cost([RowSize(0, 0, 2000)], HIDDEN_SIZE) > 2 * forward_cost([RowSize(0, 0, 1000)], HIDDEN_SIZE)


def test_the_work_of_a_large_step_grows_with_its_rows(monkeypatch):
    tries = []

    def full(shape, value):
        tries.append(shape)
        return np.array([value] * shape)

    monkeypatch.setattr(step_plan.np, "full", full)
    draw = random.Random(3)
    for num_groups in (256, 4096):
        groups = [(group, draw.randint(50, 500)) for group in range(num_groups)]
        rows = [RowSize(*of, min(8192, int(draw.lognormvariate(6.5, 0.8)) + 1)) for of in groups for _ in range(8)]
        tries.clear()
        plan_step(rows, 64, 16384, 4096)
        # One more forward a try took 222 tries of 4,096 groups.
        assert len(tries) <= 20
