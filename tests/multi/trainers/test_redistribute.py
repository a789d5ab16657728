"""Rows that change ranks arrive whole, in order and without more padding than they need."""

import pytest
import torch
from accelerate import Accelerator

from tests.multi.jobs.exchange import ROWS, padded, plans
from tests.multi.launching import run_job
from trl_ext.trainers.step import exchange
from trl_ext.trainers.step.exchange import redistribute

PLANS = list(plans(1))


@pytest.fixture(scope="module", params=[(1, ""), (2, "exchange"), (3, "exchange"), (2, "exchange by rows")])
def got(request, tmp_path_factory) -> list[dict]:
    """Of each rank, by plan, what it got."""
    num_ranks, job = request.param
    if num_ranks == 1:
        batch = padded(list(range(ROWS)))
        return [{name: redistribute(batch, wanted, Accelerator(cpu=True)) for name, wanted in plans(1).items()}]
    return run_job(job, "cpu", tmp_path_factory.mktemp("exchange"), num_ranks).ranks


@pytest.mark.parametrize("plan", PLANS)
def test_each_rank_gets_its_rows_as_if_it_had_padded_them(got, plan):
    for mine, rows in zip(got, plans(len(got))[plan], strict=True):
        if not rows:
            continue
        expected = padded(rows)
        assert list(mine[plan]) == list(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert mine[plan][key].dtype == value.dtype
                assert torch.equal(mine[plan][key], value), key
        assert [note["number"] for note in mine[plan]["notes"]] == rows
        images = zip(mine[plan]["notes"], expected["notes"], strict=True)
        assert all(torch.equal(note["image"], other["image"]) for note, other in images)
        assert mine[plan]["empty"] is None


def test_a_rank_may_be_left_without_rows(got):
    for mine in got[:-1]:
        batch = mine["all on the last"]
        assert batch["completion_ids"].shape == (0, 1) and batch["completion_ids"].dtype == torch.long
        assert batch["advantages"].shape == (0,) and batch["notes"] == []
        assert batch["num_items_in_batch"] == 7


def test_rows_without_a_scored_token_keep_one_column():
    batch = padded([0, 1, 2])
    batch["completion_mask"][:] = 0
    got = redistribute(batch, [[0, 2]], Accelerator(cpu=True))
    assert got["completion_ids"].shape == (2, 1)
    assert got["prompt_ids"].shape == (2, 4)


def test_keys_that_differ_between_tensors_and_lists_of_other_lengths_are_refused():
    with pytest.raises(AssertionError, match="other numbers of rows"):
        redistribute(padded([0, 1, 2]) | {"notes": [1]}, [[0]], Accelerator(cpu=True))


def test_no_rank_holds_more_than_the_limit_of_all_rows_at_once(monkeypatch):
    held = []

    class Recorded(Accelerator):
        def gather(self, tensor):
            held.append(tensor.nbytes)
            return super().gather(tensor)

    batch = {"prompt_mask": torch.ones(100, 50, dtype=torch.long), "prompt_ids": torch.arange(5000).view(100, 50)}
    wanted = list(range(99, -1, -3))
    monkeypatch.setattr(exchange, "GATHERED_BYTES", 4000)
    got = redistribute(batch, [wanted], Recorded(cpu=True))
    assert torch.equal(got["prompt_ids"], batch["prompt_ids"][wanted])
    assert max(held) <= 4000 and sum(held) == 2 * 100 * 50 * 8
