"""What groups begin with in common stands in a row once, and every sequence can still be read out of the row."""

import random

import numpy as np
import pytest

from trl_ext.packing.plan import plan_rows
from trl_ext.packing.ragged import Ragged, runs
from trl_ext.packing.step_plan import halves, num_tokens, plan_step
from trl_ext.packing.trie import MIN_SAVED, RowSize, find_forks

SYSTEM = list(range(100, 100 + MIN_SAVED))


def tree_of_sequences(seed: int) -> tuple[list[RowSize], dict[int, np.ndarray], list[list[int]]]:
    """Items, beginnings and tokens of groups whose beginnings fork again and again."""
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
    return items, {i: np.array(b, dtype=np.int64) for i, b in enumerate(beginnings)}, sequences


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
    items, beginnings, sequences = tree_of_sequences(seed)
    for max_tokens in (None, max(120, *map(len, sequences))):
        rows = plan_rows(items, max_tokens, beginnings)
        own = [(row, segment) for row in rows for segment in row.segments if not segment.is_prefix]
        assert sorted(segment.item for _, segment in own) == list(range(len(items)))
        for row, segment in own:
            whole = sequences[segment.item]
            assert read(row, segment, sequences) == whole
            flat = [t for s in row.segments for t in sequences[s.item][s.offset : s.offset + s.length]]
            assert [flat[row.place(segment, token)] for token in range(len(whole))] == whole
    (together,), (apart,) = plan_rows(items, None, beginnings), plan_rows(items)
    assert together.num_tokens <= apart.num_tokens
    assert all(together.segments[s.parent].is_prefix for s in together.segments if s.parent is not None)


def segments_of(*beginnings: list[int], members: int = 2) -> list[tuple[int, int | None]]:
    """Length and parent of every segment, with one own token a sequence."""
    items = [RowSize(group, len(b), 1) for group, b in enumerate(beginnings) for _ in range(members)]
    (row,) = plan_rows(items, None, {group: np.array(b) for group, b in enumerate(beginnings)})
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
def test_a_step_is_planned_by_what_its_rows_share(seed, num_ranks):
    items, beginnings, sequences = tree_of_sequences(seed)
    rows = find_forks(items, [beginnings[item.group] for item in items])
    budget = max(90, *map(len, sequences))
    plan = plan_step(rows, num_ranks, budget, 64)
    assert sorted(i for hand in plan.forwards for forward in hand for i in forward) == list(range(len(rows)))
    assert max(tokens_of(rows, plan)) <= budget
    for hand in plan.forwards:
        for forward in hand:
            if forward:
                (row,) = plan_rows([rows[i] for i in forward])
                assert row.num_tokens == num_tokens(rows[i] for i in forward)
                assert row.num_tokens <= num_tokens(items[i] for i in forward)
            one, other = halves(rows, forward) if forward else ((), ())
            assert sorted([*one, *other]) == list(forward)
            assert len(forward) < 2 or (one and other)
    assert plan_step(rows, num_ranks, budget, 64) == plan


def tree_of_turns(depth: int, turn: int) -> list[list[int]]:
    """The 2 ** depth conversations of a binary tree, in an order that tears them apart."""
    leaves = [
        [t for level in range(depth) for t in [leaf >> (depth - 1 - level), level] * (turn // 2)]
        for leaf in range(2**depth)
    ]
    return leaves[::3] + leaves[1::3] + leaves[2::3]


def test_a_tree_over_the_budget_is_cut_between_its_branches():
    leaves = [[7] * 20 + leaf for leaf in tree_of_turns(4, 32)]
    rows = find_forks([RowSize(0, 19, len(leaf) - 19) for leaf in leaves], [np.array(leaf[:-1]) for leaf in leaves])
    everything = 20 + 32 * (2 + 4 + 8 + 16)
    assert tokens_of(rows, plan_step(rows, 1, everything, 64)) == [everything]
    # Half of the tree, a quarter: each with a copy of what leads there, and no more.
    for budget, each in ((540, 20 + 32 * (1 + 2 + 4 + 8)), (300, 20 + 32 * (1 + 1 + 2 + 4))):
        found = tokens_of(rows, plan_step(rows, 1, budget, 64))
        assert sum(found) <= each * len(found) and len(found) == -(-everything // each)
    # A beginning that is short beside the rows does not hold them together.
    system = [[1] * 20 + [g] * 400 + [i] * 9 for g in range(8) for i in range(2)]
    sizes = [RowSize(one[20], 420, 9) for one in system]
    known = find_forks(sizes, [np.array(one[:-1]) for one in system])
    assert plan_step(known, 4, 2000, 64).forwards == plan_step(sizes, 4, 2000, 64).forwards
