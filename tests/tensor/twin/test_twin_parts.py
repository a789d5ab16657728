"""The parts of the memory twin in this process: what is counted, and what each adapter is for."""

import copy
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.twin import Simulation, simulation_of, why_not
from tests.twin.adapters import (
    adam_makes_its_state_only,
    attention_of_a_gpu,
    dropout_of_a_gpu,
    engine_steps,
    fakes_are_copied,
    gathers_of_any_shape,
    head_of_a_gpu,
    lists_of_ones,
    modules_cast_in_place,
    no_kernel_is_built,
    objects_from_this_rank,
    owner_of,
    ranks_that_agree,
    reference_from_config,
    replaced,
)
from tests.twin.tracker import Tracker
from trl_ext.memory.job import Job
from trl_ext.packing import kernels

KIB = 1024
OF_TORCH_AND_TRL = (lists_of_ones, modules_cast_in_place, fakes_are_copied, adam_makes_its_state_only)
OF_TORCH_AND_TRL += (dropout_of_a_gpu, attention_of_a_gpu, head_of_a_gpu, objects_from_this_rank, gathers_of_any_shape)


@pytest.fixture
def tracker():
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        yield tracker


# Counting ---------------------------------------------------------------------------------------------------------


def test_live_bytes_are_those_of_storages_that_are_referred_to_in_the_allocators_blocks(tracker):
    kept, dropped = torch.empty(KIB), torch.empty(KIB)
    assert tracker.live == 8 * KIB
    del dropped
    assert tracker.live == 4 * KIB == kept.nbytes
    part = kept.view(4, -1)[1:]  # a view counts nothing
    small = [torch.empty(1), torch.empty(129)]
    assert tracker.live == 4 * KIB + 512 + 1024
    assert part.numel() == 3 * KIB / 4 and len(small) == 2


def test_each_phase_has_its_peak_with_operation_and_module(tracker):
    layer = torch.nn.Linear(64, 64)
    tracker.name_modules(torch.nn.ModuleDict({"inner": layer}))
    rows = torch.empty(8, 64)
    with tracker.following_modules(), tracker.phase("update"):
        layer(rows)
    assert tracker.peaks["update"].module == "inner"
    assert "addmm" in tracker.peaks["update"].op
    assert tracker.peaks["update"].num_bytes > tracker.peaks["load"].num_bytes


def test_backward_names_the_module_whose_gradient_is_made(tracker):
    first, second = torch.nn.Linear(64, 8), torch.nn.Linear(8, 4096)
    tracker.name_modules(torch.nn.ModuleDict({"first": first, "second": second}))
    with tracker.following_modules():
        loss = second(first(torch.empty(2, 64))).sum()
        with tracker.phase("update"):
            loss.backward()
    assert tracker.peaks["update"].module == "backward of first"


def test_what_a_mask_selects_is_everything_counts_read_back_are_one_and_flags_are_down(tracker):
    values, mask = torch.empty(3, 5), torch.ones(3, 5, dtype=torch.bool)
    assert values[mask].shape == (15,)
    assert mask.nonzero().shape == (15, 2)
    assert torch.empty(3, dtype=torch.long).sum().item() == 1
    assert torch.zeros(1, dtype=torch.uint8).max().item() == 0
    assert not torch.empty(3).isnan().any()


# Adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", OF_TORCH_AND_TRL, ids=lambda adapter: adapter.__name__)
def test_every_name_that_an_adapter_replaces_still_exists(adapter):
    with adapter():
        pass


def test_deepspeeds_names_still_exist():
    pytest.importorskip("deepspeed")
    with ranks_that_agree(), no_kernel_is_built(), engine_steps(lambda: None, lambda: None):
        pass


def test_the_reference_model_is_made_as_told():
    with reference_from_config(lambda: "made"):
        assert import_module("trl.trainer.grpo_trainer").create_model_from_path("a-name", dtype="auto") == "made"


def test_an_adapter_of_a_name_that_is_gone_fails_and_what_one_replaces_is_back_after_it():
    with pytest.raises(AttributeError), replaced(("torch.optim.adam:_no_such_adam", None)):
        pass
    owner, name = owner_of("trl_ext.packing.attention:choose_kernel")
    before = getattr(owner, name)
    where = ("sdpa", torch.device("cpu"), torch.bfloat16, 64)
    assert before(*where) is kernels.sdpa_attention
    with attention_of_a_gpu():
        assert getattr(owner, name)(*where) is kernels.varlen_attention
    assert getattr(owner, name) is before


def test_lists_cannot_be_read_from_fakes_without_the_adapter():
    with FakeTensorMode():
        mask = torch.ones(2, 3, dtype=torch.long)
        with pytest.raises(DataDependentOutputException):
            mask.tolist()
        with lists_of_ones():
            assert mask.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_copies_are_fake_and_as_large():
    with FakeTensorMode(), fakes_are_copied():
        head = torch.nn.Linear(8, 4)
        copied = copy.deepcopy(head)
    assert copied.weight.shape == head.weight.shape
    assert copied.weight is not head.weight
    assert copied.weight.requires_grad


def head_peak(adapted):
    """Bytes that TRL's fused head adds for 256 tokens over 32,768 words."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        hidden = torch.empty(256, 64, dtype=torch.bfloat16)
        weight = torch.empty(32768, 64, dtype=torch.bfloat16)
        targets = torch.empty(256, dtype=torch.long)
        before = tracker.live
        with head_of_a_gpu() if adapted else nullcontext():
            ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768)
        return tracker.peaks["load"].num_bytes - before


def test_the_fused_head_takes_one_tile_and_several_without_the_adapter():
    tile = 2 * 256 * 32768
    assert tile < head_peak(adapted=True) < 1.02 * tile
    assert head_peak(adapted=False) > 3 * tile


def step_peak(adapted):
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        weight = torch.nn.Parameter(torch.empty(64, KIB))
        weight.grad = torch.empty(64, KIB)
        optimizer = torch.optim.AdamW([weight], foreach=False)
        with adam_makes_its_state_only() if adapted else nullcontext():
            optimizer.step()
        return tracker.peaks["load"].num_bytes


def test_adam_makes_its_two_states_and_copies_beside_them_without_the_adapter():
    one = 4 * 64 * KIB
    assert step_peak(adapted=True) == pytest.approx(4 * one, rel=0.01)
    assert step_peak(adapted=False) > 4.5 * one


def saved_by_dropout():
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        rows = torch.empty(KIB, 64, dtype=torch.bfloat16, requires_grad=True)
        before = tracker.live
        dropped = torch.nn.functional.dropout(rows, 0.1)
        return tracker.live - before - dropped.nbytes


def test_dropout_keeps_a_byte_a_value_and_two_without_the_adapter():
    with dropout_of_a_gpu():
        assert saved_by_dropout() == 64 * KIB
    assert saved_by_dropout() == 2 * 64 * KIB


def test_gathered_objects_are_this_ranks():
    found = [None, None]
    with objects_from_this_rank():
        torch.distributed.all_gather_object(found, "mine")
    assert found == ["mine", "mine"]


def test_tensors_are_gathered_flat_also_where_they_are_given_by_name(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda *pair, **_: seen.extend(pair))
    with gathers_of_any_shape():
        torch.distributed.all_gather_into_tensor(output_tensor=torch.empty(8, 2), input_tensor=torch.empty(4, 2))
    assert [tensor.shape for tensor in seen] == [(16,), (8,)]


# Simulations ------------------------------------------------------------------------------------------------------


def test_what_the_twin_cannot_follow_is_said_in_a_sentence():
    offloaded = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for word, changes in (
        ("Offloading", {"deepspeed": offloaded}),
        ("Offloading", {"arguments": {"activation_offloading": True}}),
        ("Quantised", {"adapter": {"r": 8, "quantised": True}}),
        ("8-bit", {"arguments": {"optim": "adamw_bnb_8bit"}}),
        ("third adapter", {"reward_model": "adapter"}),
    ):
        sentence = why_not(Simulation("grpo", {"model_type": "llama"}, **changes))
        assert word in sentence and sentence.endswith(".")
    for critic in ("head", "separate"):
        job = Job("ppo", critic=critic, zero_stage=2, global_batch=8)
        assert why_not(simulation_of(job, {"model_type": "llama"}, 4)) == ""


def test_two_micro_batches_stand_for_twenty():
    job = Job("grpo", global_batch=160, num_generations=8, zero_stage=2)
    arguments = simulation_of(job, {"model_type": "llama"}, 8).arguments
    assert arguments["gradient_accumulation_steps"] == 2
    assert (2 * 8) % arguments["num_generations"] == 0
