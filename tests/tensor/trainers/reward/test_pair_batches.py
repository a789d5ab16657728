"""An optimizer step's pairs under a token budget: TRL's pairs, as rows of all ranks."""

import random

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.forward.pairs import IN_MICRO_BATCH, pair_row
from trl_ext.trainers.reward.data import ANY_NUMBER, PairForward, PairSizes, RowsOfPairs, StepSampler

BATCH_SIZE = 3
MAX_TOKENS = 120


class Order(Sampler):
    """A fixed shuffle, the same for every rank and in every epoch."""

    def __init__(self, count: int):
        self.order = random.Random(1).sample(range(count), count)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def batches(count: int, drop_last: bool = False) -> BatchSampler:
    """Micro-batches of all ranks, as TRL's loader has them."""
    return BatchSampler(Order(count), BATCH_SIZE, drop_last)


def sizes(count: int, longest: int = 60) -> PairSizes:
    draw = random.Random(0)
    shared = [draw.randrange(longest // 3) for _ in range(count)]
    chosen, rejected = ([s + draw.randrange(1, longest // 3) for s in shared] for _ in range(2))
    return PairSizes(chosen, rejected, shared, hidden_size=64)


def sampler(of: BatchSampler, accumulation=2, rank=0, num_ranks=2, max_tokens=MAX_TOKENS, in_group=1) -> StepSampler:
    return StepSampler(of, sizes(len(of.sampler)), accumulation, rank, num_ranks, in_group, max_tokens, PhaseClock())


def ours(count, accumulation, num_ranks, drop_last=False, **changes) -> list[list[list[list[tuple[int, ...]]]]]:
    """[step][rank][batch][row] of one epoch."""
    ranks = []
    for rank in range(num_ranks):
        subject = sampler(batches(count, drop_last), accumulation, rank, num_ranks, **changes)
        epoch = [[tuple(pair for pair, _ in row) for row in batch] for batch in subject]
        ranks.append([epoch[i : i + accumulation] for i in range(0, len(epoch), accumulation)])
    return [list(step) for step in zip(*ranks, strict=True)]


def trls(count, accumulation, num_ranks, drop_last=False) -> list[list[int]]:
    """[step] the pairs of all ranks in one epoch, as accelerate deals TRL's batches."""
    shards = [
        list(BatchSamplerShard(batches(count, drop_last), num_ranks, rank, even_batches=False))
        for rank in range(num_ranks)
    ]
    num_steps = -(-max(map(len, shards)) // accumulation)
    return [
        [i for shard in shards for batch in shard[step * accumulation : (step + 1) * accumulation] for i in batch]
        for step in range(num_steps)
    ]


def pairs_of(step) -> list[int]:
    return [pair for rank in step for batch in rank for row in batch for pair in row]


LAYOUTS = [(accumulation, num_ranks) for accumulation in (1, 2, 4) for num_ranks in (1, 2, 3)]


@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_the_rows_of_all_ranks_hold_exactly_the_pairs_that_trl_takes_in_the_step(accumulation, num_ranks):
    count = BATCH_SIZE * accumulation * num_ranks * 3
    found, expected = ours(count, accumulation, num_ranks), trls(count, accumulation, num_ranks)
    assert len(found) == len(expected) == 3
    for step, pairs in zip(found, expected, strict=True):
        assert sorted(pairs_of(step)) == sorted(pairs)


@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_the_short_last_step_of_an_epoch_holds_the_pairs_that_are_left(accumulation, num_ranks):
    for count in range(BATCH_SIZE * accumulation * num_ranks * 2, 84):
        found, expected = ours(count, accumulation, num_ranks), trls(count, accumulation, num_ranks)
        assert [sorted(pairs_of(step)) for step in found] == [sorted(pairs) for pairs in expected]
        assert sorted(pair for step in found for pair in pairs_of(step)) == list(range(count))


def test_a_pair_knows_how_many_pairs_its_micro_batch_has_in_trl():
    of = batches(8)  # 3, 3 and 2 pairs
    expected = {pair: len(batch) for batch in of for pair in batch}
    found = dict(pair for batch in sampler(of, accumulation=3, num_ranks=1) for row in batch for pair in row)
    assert found == expected and set(found.values()) == {3, 2}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_there_are_as_many_batches_as_trl_has(accumulation, num_ranks, drop_last):
    for count in range(1, 40):
        for rank in range(num_ranks):
            shard = BatchSamplerShard(batches(count, drop_last), num_ranks, rank)
            subject = sampler(batches(count, drop_last), accumulation, rank, num_ranks)
            assert len(subject) == len(shard) == len(list(subject))


@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_dropping_the_last_drops_what_trl_drops(accumulation, num_ranks):
    count = BATCH_SIZE * (accumulation * num_ranks * 2 + num_ranks) + 2
    shards = [list(BatchSamplerShard(batches(count, True), num_ranks, rank)) for rank in range(num_ranks)]
    kept = {pair for shard in shards for batch in shard for pair in batch}
    found = [pair for step in ours(count, accumulation, num_ranks, drop_last=True) for pair in pairs_of(step)]
    assert sorted(found) == sorted(kept)


@pytest.mark.parametrize("max_tokens", [60, MAX_TOKENS, 100_000])
@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_the_last_batch_of_a_step_always_holds_a_row(accumulation, num_ranks, max_tokens):
    """After it the weights change, whatever the batches before it held."""
    for count in range(1, 40):
        for step in ours(count, accumulation, num_ranks, max_tokens=max_tokens):
            assert all(rank[-1] for rank in step)


@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_every_rank_has_as_many_rows_as_the_others_in_every_batch(accumulation, num_ranks):
    for step in ours(40, accumulation, num_ranks):
        for batch in zip(*step, strict=True):
            assert len({len(rows) for rows in batch}) == 1


@pytest.mark.parametrize(("accumulation", "num_ranks"), LAYOUTS)
def test_no_row_is_over_the_budget(accumulation, num_ranks):
    tokens = sizes(40).tokens
    rows = [row for step in ours(40, accumulation, num_ranks) for rank in step for batch in rank for row in batch]
    assert max(sum(tokens[i] for i in row) for row in rows) <= MAX_TOKENS


def test_two_epochs_of_a_shuffled_dataset_are_two_shuffles():
    subject = sampler(BatchSampler(RandomSampler(range(24)), BATCH_SIZE, False), num_ranks=1)
    first, second = list(subject), list(subject)
    assert first != second
    for epoch in (first, second):
        assert sorted(pair for batch in epoch for row in batch for pair, _ in row) == list(range(24))


def test_accelerate_finds_the_sampler_whose_epoch_it_sets():
    of = batches(12)
    assert sampler(of).sampler is of.sampler
    assert (sampler(of).batch_size, sampler(of).drop_last) == (BATCH_SIZE, False)


def test_planning_is_charged_to_the_layout():
    clock = PhaseClock()
    list(StepSampler(batches(12), sizes(12), 2, 0, 1, 1, MAX_TOKENS, clock))
    assert list(clock.take()) == ["layout"]


def test_a_pairs_tokens_count_shared_ones_once():
    subject = PairSizes([10, 5], [8, 5], [6, 0], hidden_size=64)
    assert subject.tokens == [12, 10]
    assert subject.costs[0] > subject.tokens[0]


def test_a_dataset_of_rows_hands_out_the_pairs_of_a_row():
    rows = RowsOfPairs([{"id": name} for name in "abcd"])
    assert rows[((3, 2), (1, 1))] == [{"id": "d", IN_MICRO_BATCH: 2}, {"id": "b", IN_MICRO_BATCH: 1}]
    assert rows[()] == []
    assert len(rows) == 4


def test_ranks_of_a_group_get_the_same_rows_of_the_same_step():
    shared, alone = (ours(64, 2, 4, in_group=in_group) for in_group in (2, 1))
    assert [len(step) for step in shared] == [len(step) for step in alone]
    for step, others in zip(shared, alone, strict=True):
        assert step[0] == step[1] != step[2] == step[3]
        assert sorted(pairs_of([step[0], step[2]])) == sorted(pairs_of(others))


def halved(num_pairs: int, times: int, most_rows: int) -> list[int]:
    """Pairs of each forward after `times` halvings of a row of `num_pairs`."""

    def make_row(pairs):
        return pair_row(pairs, True, None)

    row = make_row([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}] * num_pairs)
    forwards = [PairForward(row, make_row, most_rows, num_pairs)]
    for _ in range(times):
        forwards = [half for forward in forwards for half in forward.halves()]
    return [forward.num_rows for forward in forwards]


@pytest.mark.parametrize(
    ("num_pairs", "times", "expected"),
    [(1, 3, [1]), (3, 1, [2, 1]), (3, 2, [1, 1, 1]), (3, 3, [1, 1, 1]), (7, 2, [2, 2, 2, 1]), (7, 3, [1] * 7)],
)
def test_ranks_of_equally_many_pairs_never_halve_into_an_empty_forward(num_pairs, times, expected):
    assert halved(num_pairs, times, most_rows=num_pairs) == expected


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ranks_of_different_numbers_of_pairs_halve_into_equally_many_forwards(times):
    assert {len(halved(num_pairs, times, ANY_NUMBER)) for num_pairs in range(8)} == {2**times}
