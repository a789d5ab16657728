"""Rows that processes share are computed as one process computes them."""

from functools import cache

import pytest
import torch

from tests.batches import RAGGED, Batch, alone, gradient
from tests.faults.starting import IS_THOROUGH
from tests.multi.jobs.ulysses import BUDGETS, CASES, TEMPERATURE, subject
from tests.multi.jobs.ulysses import model as model_of
from tests.multi.launching import run_job
from trl_ext.packing.layout import lay_out
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

torch.set_num_threads(1)


# Processes, and how many of them share a row.
@pytest.fixture(
    scope="module",
    params=[(2, 2), *([(4, 4), (4, 2)] if IS_THOROUGH else [])],
    ids=lambda sizes: f"{sizes[0]} by {sizes[1]}",
)
def got(request, tmp_path_factory) -> list[dict]:
    """Of each process, by case, what it computed."""
    num_processes, size = request.param
    return run_job("ulysses", "cpu", tmp_path_factory.mktemp("ulysses"), num_processes, size=size).ranks


@cache
def of_each_row_alone(family: str, given: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = model_of(family)
    logps, entropies = alone(model, given, temperature=TEMPERATURE)
    return logps.detach(), entropies.detach(), gradient(model, (logps * given.weights()).sum())


@cache
def of_one_process(family: str, share_prompt: bool, given: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model, flat = subject(family), unpad(given.input_ids, given.attention_mask, given.width)
    result = score(model, flat, plan(flat, share_prompt), torch.device("cpu"), compute_entropy=True)
    own = gradient(model, (result.logps * given.weights()).sum())
    return result.logps.detach(), result.entropies.detach(), own


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_are_those_of_one_process(got, name, budget):
    family, share_prompt, given = CASES[name]
    for (logps, entropies, whole), bound in (
        (of_one_process(family, share_prompt, given), 1e-6),
        (of_each_row_alone(family, given), 5e-6),  # as for rows that are packed in one process
    ):
        for one in got:
            assert (one[name, budget]["logps"] - logps).abs().max() < bound
            assert (one[name, budget]["entropies"] - entropies).abs().max() < bound
            assert (one[name, budget]["gradient"] - whole).abs().max() / whole.abs().max() < bound


def test_each_process_forwards_its_part_of_the_row(got):
    flat = unpad(RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width)
    (row,) = plan(flat, share_prompt=True)
    size = got[0]["size"]
    filler = 1  # two tokens, padded to the size
    assert {one["llama shared", None]["num_forwarded"] for one in got} == {-(-row.num_tokens // size) + filler}


def test_parts_make_the_row():
    flat = unpad(RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width)
    (row,) = plan(flat, share_prompt=True)
    whole = lay_out(row, flat.sequences, flat.num_scored)
    parts = [whole.part(SequenceGroup(4, rank)) for rank in range(4)]
    assert {part.num_tokens for part in parts} == {-(-whole.num_tokens // 4)}
    ids = torch.cat([part.input_ids for part in parts], dim=1)[:, : whole.num_tokens]
    assert torch.equal(ids, whole.input_ids)
    scored = [torch.stack([part.scored_item, part.scored_offset, part.labels]) for part in parts]
    expected = torch.stack([whole.scored_item, whole.scored_offset, whole.labels])
    assert torch.equal(torch.cat(scored, dim=1), expected)
