"""Planning: integers only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.errors import PackingError
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize


@st.composite
def ragged(draw) -> list[RowSize]:
    """Sequences of all lengths, whose mates may stand apart."""
    shared = draw(st.lists(st.integers(0, 40), min_size=1, max_size=10))
    owns = draw(st.lists(st.tuples(st.integers(0, len(shared) - 1), st.integers(1, 50)), min_size=1, max_size=40))
    return [RowSize(group, shared[group], own) for group, own in owns]


@st.composite
def planned(draw) -> tuple[list[RowSize], int | None]:
    """Sequences and a budget that holds the longest of them, or none."""
    items = draw(ragged())
    longest = max(item.length for item in items)
    return items, draw(st.none() | st.integers(longest, 3 * longest))


def tokens_of(rows, index):
    """Positions of a sequence that are forwarded for it alone."""
    own = [s for row in rows for s in row.segments if s.item == index and not s.is_prefix]
    return [p for s in own for p in range(s.offset, s.offset + s.length)]


@given(planned())
def test_every_token_lands_once_sees_its_beginning_and_rows_keep_to_the_budget_without_gaps(case):
    items, max_tokens = case
    rows = plan_rows(items, max_tokens)
    for index, item in enumerate(items):
        assert tokens_of(rows, index)[-item.own :] == list(range(item.shared, item.length))
        assert len(tokens_of(rows, index)) in (item.own, item.length)
    for row in rows:
        for segment in row.segments:
            above = row.segments[segment.parent] if segment.parent is not None else None
            assert segment.offset == (above.offset + above.length if above else 0)
            assert above is None or above.end <= segment.start
        assert max_tokens is None or row.num_tokens <= max_tokens
        ends = [0, *(s.end for s in row.segments)]
        assert [s.start for s in row.segments] == ends[:-1]
        assert ends[-1] == row.num_tokens
    # No worse than a row for each, and the same every time.
    assert sum(row.num_tokens for row in rows) <= sum(item.length for item in items)
    assert plan_rows(items, max_tokens) == rows


def test_a_shared_prompt_is_forwarded_once_also_where_mates_stand_apart():
    (row,) = plan_rows([RowSize(0, 10, 3)] * 8)
    assert row.num_tokens == 10 + 8 * 3
    (row,) = plan_rows([RowSize(0, 10, 3), RowSize(1, 5, 2), RowSize(0, 10, 4), RowSize(1, 5, 1)])
    assert row.num_tokens == 10 + 7 + 5 + 3
    (row,) = plan_rows([RowSize(0, 10, 3)])
    assert [(s.length, s.offset, s.is_prefix) for s in row.segments] == [(13, 0, False)]
    # A group over the budget is cut, and each part has a copy of the prompt.
    assert [row.num_tokens for row in plan_rows([RowSize(0, 10, 20)] * 4, 50)] == [50, 50]


def test_the_longest_sequence_raises_a_budget_below_it():
    rows = plan_rows([RowSize(0, 4, 5), RowSize(1, 14, 20), RowSize(2, 0, 20)], 30)
    assert [row.num_tokens for row in rows] == [29, 34]


def test_impossible_items_are_refused():
    for items, words in (
        ([], "nothing to pack"),
        ([RowSize(0, 3, 0)], "needs at least one more"),
        ([RowSize(0, 3, 1), RowSize(0, 4, 1)], "share the same"),
    ):
        with pytest.raises(PackingError, match=words):
            plan_rows(items)
