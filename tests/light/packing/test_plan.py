"""Planning: integers only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.errors import PackingError
from trl_ext.packing.plan import Item, plan_rows


@st.composite
def ragged(draw) -> list[Item]:
    """Sequences of all lengths, whose mates may stand apart."""
    shared = draw(st.lists(st.integers(0, 40), min_size=1, max_size=10))
    owns = draw(st.lists(st.tuples(st.integers(0, len(shared) - 1), st.integers(1, 50)), min_size=1, max_size=40))
    return [Item(group, shared[group], own) for group, own in owns]


@st.composite
def planned(draw) -> tuple[list[Item], int | None]:
    """Sequences and a budget that holds the longest of them, or none."""
    items = draw(ragged())
    longest = max(item.length for item in items)
    return items, draw(st.none() | st.integers(longest, 3 * longest))


def tokens_of(rows, index):
    """Positions of a sequence that are forwarded for it alone."""
    own = [s for row in rows for s in row.segments if s.item == index and not s.is_prefix]
    return [p for s in own for p in range(s.offset, s.offset + s.length)]


@given(planned())
def test_every_own_token_lands_in_exactly_one_row(case):
    items, max_tokens = case
    rows = plan_rows(items, max_tokens)
    for index, item in enumerate(items):
        assert tokens_of(rows, index)[-item.own :] == list(range(item.shared, item.length))
        assert len(tokens_of(rows, index)) in (item.own, item.length)


@given(planned())
def test_a_segment_sees_all_that_stands_before_it_in_its_sequence(case):
    for row in plan_rows(*case):
        for segment in row.segments:
            above = row.segments[segment.parent] if segment.parent is not None else None
            assert segment.offset == (above.offset + above.length if above else 0)
            assert above is None or above.end <= segment.start


@given(planned())
def test_rows_keep_to_the_budget_and_have_no_gaps(case):
    for row in plan_rows(*case):
        assert case[1] is None or row.num_tokens <= case[1]
        ends = [0, *(s.end for s in row.segments)]
        assert [s.start for s in row.segments] == ends[:-1]
        assert ends[-1] == row.num_tokens


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


@given(planned())
def test_packing_is_no_worse_than_one_row_each_and_the_same_every_time(case):
    rows = plan_rows(*case)
    assert sum(row.num_tokens for row in rows) <= sum(item.length for item in case[0])
    assert plan_rows(*case) == rows


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
