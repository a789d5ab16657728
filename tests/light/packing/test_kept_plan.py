"""Steps whose prompts are forwarded once: every row once, the budget kept, ranks in step."""

import random

import pytest

from trl_ext.packing.plan import behind, plan_rows
from trl_ext.packing.step_plan import RowSize, plan_step

HIDDEN_SIZE = 896


def groups(draw: random.Random) -> list[RowSize]:
    """Rows of some groups, long and short prompts, as they come from a generation or shuffled."""
    rows = [
        RowSize(group, shared, draw.randint(1, 400))
        for group in range(draw.randint(1, 6))
        for shared in [draw.choice([0, 7, 300, 2000, 4000])]
        for _ in range(draw.choice([1, 4, 16, 32]))
    ]
    if draw.random() < 0.5:
        draw.shuffle(rows)
    return rows


def tokens_alive(rows: list[RowSize], plan, rank: int, place: int) -> int:
    """Tokens whose activations are there in a forward: its own, and those of the prefix that is kept."""
    shared: dict[int, int] = {}
    for stretch in plan.prefix_groups:
        group = stretch.groups[rank]
        if stretch.begin <= place < stretch.end and group is not None:
            shared[group] = next(row.shared for row in rows if row.group == group)
    shared |= {rows[i].group: rows[i].shared for i in plan.forwards[rank][place]}
    return sum(shared.values()) + sum(rows[i].own for i in plan.forwards[rank][place])


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_that_keeps_prompts(seed):
    draw = random.Random(seed)
    rows, num_ranks, budget = groups(draw), draw.randint(1, 4), draw.choice([600, 2500, 4600, 9000])
    homes = [draw.randrange(num_ranks) for _ in rows] if draw.random() < 0.3 else None
    plan = plan_step(rows, num_ranks, budget, HIDDEN_SIZE, homes, caches=True)
    assert sorted(i for hand in plan.forwards for forward in hand for i in forward) == list(range(len(rows)))
    assert len({len(hand) for hand in plan.forwards}) == 1
    if homes is not None:
        assert all(homes[i] == rank for rank, hand in enumerate(plan.forwards) for forward in hand for i in forward)
    for rank, hand in enumerate(plan.forwards):
        assert all(tokens_alive(rows, plan, rank, place) <= plan.max_tokens for place in range(len(hand)))
        for stretch in plan.prefix_groups:
            of_rank = hand[stretch.begin : stretch.end]
            if stretch.groups[rank] is not None:  # the first tells the tokens; all that follow are behind them
                assert of_rank[0]
                assert {rows[i].group for forward in of_rank for i in forward} == {stretch.groups[rank]}
    assert plan == plan_step(rows, num_ranks, budget, HIDDEN_SIZE, homes, caches=True)


def test_a_group_of_many_forwards_pays_its_prompt_once_on_each_rank():
    rows = [RowSize(0, 4000, 128) for _ in range(32)]
    alone = plan_step(rows, 1, 4600, HIDDEN_SIZE, caches=True)
    assert [(one.begin, one.end, one.groups) for one in alone.prefix_groups] == [(0, len(alone.forwards[0]), (0,))]
    again = plan_step(rows, 1, 4600, HIDDEN_SIZE)
    assert alone.costs[0] < 0.4 * again.costs[0]
    whole_groups = plan_step([RowSize(g, 4000, 128) for g in range(4) for _ in range(32)], 4, 4600, 896, caches=True)
    assert sorted(whole_groups.prefix_groups[0].groups) == [0, 1, 2, 3]


def test_short_prompts_and_groups_that_fit_are_planned_as_without():
    short = [RowSize(0, 20, 128) for _ in range(32)]
    fits = [RowSize(g, 400, 50) for g in range(8) for _ in range(4)]
    for rows in (short, fits):
        assert plan_step(rows, 2, 1000, HIDDEN_SIZE, caches=True) == plan_step(rows, 2, 1000, HIDDEN_SIZE)


def test_a_call_that_gathers_weights_has_to_save_more():
    rows = [RowSize(0, 700, 128) for _ in range(8)]
    assert plan_step(rows, 1, 1300, HIDDEN_SIZE, caches=True).prefix_groups
    assert not plan_step(rows, 1, 1300, HIDDEN_SIZE, caches=True, gathers=True).prefix_groups


@pytest.mark.parametrize("num_kept", [5, 40, 64])
def test_a_row_behind_a_prefix_holds_all_other_tokens_at_their_positions(num_kept):
    items = [RowSize(0, 64, own) for own in (3, 1, 9)]
    (row,) = plan_rows(items)
    moved = behind(row, num_kept)
    assert moved.num_tokens == row.num_tokens - num_kept
    assert [segment.start for segment in moved.forwarded] == sorted(segment.start for segment in moved.forwarded)
    for segment in moved.forwarded:
        assert segment.offset >= num_kept and segment.parent is not None
        parent = moved.segments[segment.parent]
        assert parent.offset + parent.length == segment.offset
    assert {(s.item, s.num_keys) for s in moved.forwarded if not s.is_prefix} == {(0, 67), (1, 65), (2, 73)}
