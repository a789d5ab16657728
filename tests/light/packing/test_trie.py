"""What groups begin with in common stands in a row once, and every sequence can still be read out of the row."""

import random

import numpy as np
import pytest

from trl_ext.packing.plan import MIN_SAVED, plan_rows
from trl_ext.packing.ragged import Ragged, runs
from trl_ext.packing.step_plan import RowSize, halves, num_tokens, plan_step

SYSTEM = list(range(100, 100 + MIN_SAVED))


def tree_of_sequences(seed: int) -> tuple[list[RowSize], list[np.ndarray], list[list[int]]]:
    """Items, what they may share, and tokens of groups whose beginnings fork again and again."""
    draw = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(3) for _ in range(draw.randrange(most + 1))]

    beginnings = [tokens(30)]
    for _ in range(draw.randrange(2, 9)):
        begun = draw.choice(beginnings[-3:])
        beginnings.append([*begun[: len(begun) - draw.randrange(8)], *tokens(40)] if draw.random() < 0.8 else begun)
    items, sequences = [], []
    for _ in range(draw.randrange(3, 20)):
        group = draw.randrange(len(beginnings))
        own = [7, *tokens(5)]
        items.append(RowSize(group, len(beginnings[group]), len(own)))
        sequences.append([*beginnings[group], *own])
    return items, [np.array(beginnings[item.group], dtype=np.int64) for item in items], sequences


def read(row, segment, sequences) -> list[int]:
    """The tokens that the last token of a segment sees, by the tokens that stand in the row."""
    flat = [t for s in row.segments for t in sequences[s.item][s.offset : s.offset + s.length]]
    seen = flat[segment.start : segment.end]
    while segment.parent is not None:
        segment = row.segments[segment.parent]
        seen = flat[segment.start : segment.end] + seen
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_reads_whole_along_its_chain_and_a_trie_takes_no_more_tokens_than_groups_apart(seed):
    items, shareable, sequences = tree_of_sequences(seed)
    for max_tokens in (None, max(120, *map(len, sequences))):
        rows = plan_rows(items, max_tokens, shareable)
        own = [(row, segment) for row in rows for segment in row.segments if not segment.is_prefix]
        assert sorted(segment.item for _, segment in own) == list(range(len(items)))
        for row, segment in own:
            whole = sequences[segment.item]
            assert read(row, segment, sequences) == whole
            flat = [t for s in row.segments for t in sequences[s.item][s.offset : s.offset + s.length]]
            assert [flat[row.place(segment, token)] for token in range(len(whole))] == whole
    (together,), (apart,) = plan_rows(items, None, shareable), plan_rows(items)
    assert together.num_tokens <= apart.num_tokens
    assert all(together.segments[s.parent].is_prefix for s in together.segments if s.parent is not None)


def segments_of(*beginnings: list[int], members: int = 2) -> list[tuple[int, int | None]]:
    """Length and parent of every segment, with one own token a sequence."""
    items = [RowSize(group, len(b), 1) for group, b in enumerate(beginnings) for _ in range(members)]
    (row,) = plan_rows(items, None, [np.array(beginnings[item.group]) for item in items])
    return [(s.length, s.parent) for s in row.segments]


def test_a_system_prompt_stands_once_before_the_prompts_of_its_groups():
    members = [(1, 0), *[(1, 1)] * 2, *[(1, 2)] * 2]
    assert segments_of([*SYSTEM, 1, 2], [*SYSTEM, 3]) == [(MIN_SAVED, None), (2, 0), *members]
    # A prompt that goes on from another one's end sees it whole, and lone sequences share as groups do.
    assert segments_of(SYSTEM, [*SYSTEM, 1, 2]) == [(MIN_SAVED, None), (2, 0), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert segments_of([*SYSTEM, 1, 2], [*SYSTEM, 3], members=1) == [(MIN_SAVED, None), (3, 0), (2, 0)]
    # What saves less than a launch costs is repeated.
    assert segments_of([*SYSTEM[1:], 1, 2], [*SYSTEM[1:], 3])[:2] == [(MIN_SAVED + 1, None), (MIN_SAVED, None)]


def test_runs_are_ranges_side_by_side_and_ragged_sequences_read_back():
    assert runs([5, 0, 9], [2, 0, 3]).tolist() == [5, 6, 9, 10, 11]
    assert runs([], []).tolist() == []
    ragged = Ragged.of([[1, 2], [], [3]])
    assert [one.tolist() for one in ragged] == [[1, 2], [], [3]]
    assert ragged.lengths.tolist() == [2, 0, 1]


def tokens_of(rows: list[RowSize], plan) -> list[int]:
    return [num_tokens(rows[i] for i in forward) for hand in plan.forwards for forward in hand]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_the_layout_of_a_planned_forward_takes_no_more_tokens_than_the_plan_counts(seed, num_ranks):
    items, shareable, sequences = tree_of_sequences(seed)
    budget = max(90, *map(len, sequences))
    plan = plan_step(items, num_ranks, budget, 64)
    assert sorted(i for hand in plan.forwards for forward in hand for i in forward) == list(range(len(items)))
    assert max(tokens_of(items, plan)) <= budget
    for forward in (forward for hand in plan.forwards for forward in hand if forward):
        (row,) = plan_rows([items[i] for i in forward], None, [shareable[i] for i in forward])
        assert row.num_tokens <= num_tokens(items[i] for i in forward)
        one, other = halves(items, forward)
        assert sorted([*one, *other]) == list(forward)
        assert len(forward) < 2 or (one and other)
    assert plan_step(items, num_ranks, budget, 64) == plan
