"""Planning: integers only."""

import random

import pytest

from trl_ext.errors import PackingError
from trl_ext.packing.plan import Item, plan_rows


def ragged(count: int, seed: int = 0) -> list[Item]:
    draw = random.Random(seed)
    shared = {group: draw.randrange(0, 40) for group in range(count)}
    return [Item(g, shared[g], draw.randrange(1, 50)) for g in (draw.randrange(count // 3 + 1) for _ in range(count))]


def tokens_of(rows, index):
    """Positions of a sequence that are forwarded for it alone."""
    own = [s for row in rows for s in row.segments if s.item == index and not s.is_prefix]
    return [p for s in own for p in range(s.offset, s.offset + s.length)]


@pytest.mark.parametrize("max_tokens", [None, 90, 200])
@pytest.mark.parametrize("seed", range(5))
def test_every_own_token_lands_in_exactly_one_row(seed, max_tokens):
    items = ragged(30, seed)
    rows = plan_rows(items, max_tokens)
    for index, item in enumerate(items):
        assert tokens_of(rows, index)[-item.own :] == list(range(item.shared, item.length))
        assert len(tokens_of(rows, index)) in (item.own, item.length)


@pytest.mark.parametrize("seed", range(5))
def test_a_segment_sees_all_that_stands_before_it_in_its_sequence(seed):
    for row in plan_rows(ragged(30, seed), 120):
        for segment in row.segments:
            assert segment.prefix[1] - segment.prefix[0] == segment.offset
            assert segment.prefix[1] <= segment.start or segment.offset == 0


@pytest.mark.parametrize("max_tokens", [90, 91, 150])
def test_no_row_is_over_the_budget(max_tokens):
    assert max(row.num_tokens for row in plan_rows(ragged(60), max_tokens)) <= max_tokens


def test_segments_follow_each_other_without_gaps():
    for row in plan_rows(ragged(30), 150):
        ends = [0, *(s.end for s in row.segments)]
        assert [s.start for s in row.segments] == ends[:-1]


def test_a_shared_prompt_is_forwarded_once():
    (row,) = plan_rows([Item(0, 10, 3)] * 8)
    assert row.num_tokens == 10 + 8 * 3


def test_mates_that_stand_apart_in_the_batch_still_share():
    (row,) = plan_rows([Item(0, 10, 3), Item(1, 5, 2), Item(0, 10, 4), Item(1, 5, 1)])
    assert row.num_tokens == 10 + 7 + 5 + 3


def test_a_lone_sequence_is_one_root_segment():
    (row,) = plan_rows([Item(0, 10, 3)])
    assert [(s.length, s.offset, s.is_prefix) for s in row.segments] == [(13, 0, False)]


def test_a_group_over_the_budget_is_cut_and_copies_its_prompt():
    rows = plan_rows([Item(0, 10, 20)] * 4, 50)
    assert [row.num_tokens for row in rows] == [50, 50]


def test_equal_batches_give_equal_plans():
    assert plan_rows(ragged(40), 130) == plan_rows(ragged(40), 130)


def test_packing_is_no_worse_than_one_row_each():
    items = ragged(40)
    assert sum(row.num_tokens for row in plan_rows(items, 100)) <= sum(item.length for item in items)


def test_a_budget_below_the_longest_sequence_is_refused_with_the_number_to_set():
    with pytest.raises(PackingError, match="Set max_tokens_per_forward to at least 34"):
        plan_rows([Item(0, 4, 5), Item(1, 14, 20)], 30)


@pytest.mark.parametrize(
    ("items", "words"),
    [([], "nothing to pack"), ([Item(0, 3, 0)], "needs one own"), ([Item(0, 3, 1), Item(0, 4, 1)], "share the same")],
)
def test_impossible_items_are_refused(items, words):
    with pytest.raises(PackingError, match=words):
        plan_rows(items)
