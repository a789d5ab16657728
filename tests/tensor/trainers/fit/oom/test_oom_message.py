"""What the error says: the phase it rose in, and what would fit, with the planner's numbers."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from tests.plans import FULL, named_stage, planned
from trl_ext.memory.planner.alternatives import alternatives
from trl_ext.memory.units import gib
from trl_ext.trainers.fit.message import GENERAL, cheapest_change, explained
from trl_ext.trainers.fit.rehearsal import rehearsal
from trl_ext.trainers.ppo.critic.critics import SeparateCritic
from trl_ext.trainers.ppo.trainer import PPOTrainer
from trl_ext.trainers.reward.trainer import RewardTrainer
from trl_ext.trainers.step.out_of_memory import ELSEWHERE, PLACES, place_of


class Halving:
    """Forwards that are not halved."""

    why_not = "memory_on_oom is 'raise'"
    level = staticmethod(lambda role: 0)


def trainer(folder, memory_plan=None) -> SimpleNamespace:
    args = SimpleNamespace(
        memory_plan=memory_plan, output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    accelerator = SimpleNamespace(
        num_processes=4, process_index=1, state=SimpleNamespace(deepspeed_plugin=None), distributed_type="MULTI_GPU"
    )
    running = SimpleNamespace(num_rows=4, num_tokens=8192)
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        state=SimpleNamespace(global_step=11),
        model=SimpleNamespace(config=SimpleNamespace(_name_or_path="llama")),
        forward_loop=SimpleNamespace(last=running, halving=Halving),
    )


def raised_in(name: str) -> torch.OutOfMemoryError:
    """The allocator's error, through a function of this name."""

    def compute_loss():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB.")

    function = type(compute_loss)(compute_loss.__code__.replace(co_name=name), {"torch": torch})
    try:
        function()
    except torch.OutOfMemoryError as error:
        return error


def test_the_message_names_place_numbers_changes_and_the_next_stage(tmp_path):
    run = planned(**FULL)
    text = str(explained(raised_in("compute_loss"), trainer(tmp_path, run)))
    opening = "Out of memory in the forward: step 12, rank 1, 4 rows of 8,192 tokens together. "
    assert text.startswith(f"{opening}CUDA out of memory. Tried to allocate 1.96 GiB. It could not")
    for i, one in enumerate(alternatives(run.estimate, "update", 1.96), 1):
        need = gib(one.estimate.need_bytes)
        assert f"({i}) {one.key}: {one.saves_gib:.1f} GiB less there, {need:.1f} in all" in text
    assert text.endswith(f"The next ZeRO stage or offload: {named_stage(**FULL)}.")
    assert not list(tmp_path.iterdir())


def test_without_a_plan_it_names_the_general_remedies(tmp_path):
    text = str(explained(raised_in("_generate"), trainer(tmp_path)))
    assert GENERAL["generate"] in text
    assert "`trl-ext check RECIPE` shows what would fit" in text
    assert "next ZeRO stage" not in text


def test_where_memory_is_short_the_cheapest_change_is_named_with_what_it_needs(tmp_path):
    run = planned(**FULL)
    cheapest = alternatives(run.estimate)[0]
    hint = cheapest_change(trainer(tmp_path, run))
    assert f"set {cheapest.key} ({gib(cheapest.estimate.need_bytes):.1f} GiB by the plan)" in hint


def test_without_a_plan_the_micro_batch_becomes_smaller_and_then_there_are_general_remedies(tmp_path):
    run = trainer(tmp_path)
    sizes = "per_device_train_batch_size=2 gradient_accumulation_steps=4"
    assert cheapest_change(run) == f"set {sizes}; the optimisation stays the same."
    run.args.per_device_train_batch_size = 1
    assert GENERAL[""] in cheapest_change(run)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.words)
def test_a_place_is_known_by_each_of_its_functions(place):
    for name in place.functions:
        assert place_of(raised_in(name)) is place


def test_every_function_that_tells_a_place_exists():
    """A renamed method would move its errors to "outside the training step" without a word."""
    owners = (
        PPOTrainer,
        SeparateCritic,
        RewardTrainer,
        Accelerator,
        torch.optim.Optimizer,
        TrainerCallback,
        rehearsal,
    )
    names = [name for place in PLACES for name in place.functions]
    assert not [name for name in names if not any(hasattr(owner, name) for owner in owners)]


def test_what_rises_nowhere_in_particular_is_elsewhere():
    assert place_of(raised_in("anything")) is ELSEWHERE
