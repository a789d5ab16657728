"""`torch.compile`: packed rows of all lengths share their graphs, and a model without segments compiles as before."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from tests import tiny
from tests.batches import batch, gradient, ready_to_pack
from trl_ext.packing import attention
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # As an error, not as a warning that is printed once.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def test_rows_of_all_lengths_share_their_graphs_and_give_the_same_numbers():
    model = ready_to_pack(tiny.model("llama", num_hidden_layers=1))
    compiled = torch.compile(model, backend="eager")
    draw = random.Random(0)
    num_graphs = []
    for _ in range(12):
        groups = [(draw.randrange(3, 30), tuple(draw.randrange(1, 20) for _ in range(3))) for _ in range(2)]
        given = batch(*groups)
        flat = unpad(given.input_ids, given.attention_mask, given.width)
        plain, fast = (score(m, flat, plan(flat, True), torch.device("cpu")).logps for m in (model, compiled))
        assert (plain - fast).abs().max() < 5e-6
        expected, found = gradient(model, plain.sum()), gradient(model, fast.sum())
        assert (found - expected).norm() <= 2e-6 * expected.norm()
        num_graphs.append(counters["stats"]["unique_graphs"])
    # The first row is compiled for its length, the second for every length.
    assert num_graphs[1] > num_graphs[0] > 0
    assert set(num_graphs[2:]) == {num_graphs[1]}


def test_a_forward_without_segments_compiles_into_one_graph():
    """Registering under transformers' names must not break up the graphs of other models of the process."""
    model = tiny.model("llama", num_hidden_layers=2).eval()
    attention.take_segments(model.config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        expected, found = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (model, compiled))
    assert torch.equal(expected, found)
