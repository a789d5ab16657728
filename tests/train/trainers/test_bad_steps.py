"""Steps without room or without anything to learn: TRL's weights, a sentence, and no division by zero."""

import math
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset

import trl_ext
from tests import ppo_trainers, tiny
from tests.rollouts import rollout
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

PROMPTS = [{"prompt": tiny.words(*range(5, 5 + length))} for length in (9, 1, 4, 30) * 4]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def nothing(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


def one_of_four(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """One prompt's completions differ, the others' do not."""
    scores = reward(completion_ids)
    return [score if len(prompt.split()) == 4 else 0.5 for prompt, score in zip(prompts, scores, strict=True)]


def trained(library: Any, tmp_path: Any, rewards: Any = reward, rows: Any = None, **changes: Any) -> Any:
    """A trainer after two steps of two groups each."""
    settings = dict(output_dir=str(tmp_path), **tiny.QUIET_ON_CPU, max_steps=2, save_strategy="no", logging_steps=1)
    settings |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, beta=0.0)
    settings |= dict(max_completion_length=12, learning_rate=1e-3, adam_epsilon=1e-3, lr_scheduler_type="constant")
    subject = library.GRPOTrainer(
        tiny.model("llama"),
        rewards,
        library.GRPOConfig(**settings | dict(gradient_checkpointing=False) | changes),
        Dataset.from_list(PROMPTS) if rows is None else rows,
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
    )
    subject.before = weights(subject)
    subject.train()
    return subject


def weights(subject: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten().clone() for weight in subject.model.parameters()])


def steps_of(subject: Any) -> list[dict[str, float]]:
    return [entry for entry in subject.state.log_history if "loss" in entry]


# Budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_below_the_longest_row_is_refused_before_ppo_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens and a completion of up to 12 make \d+. Set it to"):
        ppo_trainers.trainer("head", tmp_path, max_tokens_per_forward=13)


def test_a_row_of_a_stream_that_is_longer_than_the_budget_gets_a_forward_of_its_own(tmp_path):
    def stream() -> IterableDataset:
        return IterableDataset.from_generator(lambda: iter(PROMPTS))

    theirs = weights(trained(trl, tmp_path, rows=stream(), shuffle_dataset=False))
    ours = trained(trl_ext, tmp_path, rows=stream(), shuffle_dataset=False, packing=True, max_tokens_per_forward=24)
    assert (weights(ours) - theirs).abs().max() <= 1e-6
    assert ours._packs


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_a_group_that_a_budget_cuts_trains_to_the_weights_of_the_whole_one(loss_type, tmp_path):
    whole, cut = (
        trained(trl_ext, tmp_path, loss_type=loss_type, packing=True, max_tokens_per_forward=budget)
        for budget in (None, 44)
    )
    assert (weights(whole) - whole.before).abs().max() > 1e-4
    assert (weights(whole) - weights(cut)).abs().max() <= 1e-6
    for one, other in zip(steps_of(whole), steps_of(cut), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


# Nothing to learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_a_step_whose_groups_are_all_alike_changes_nothing_and_says_so(loss_type, tmp_path):
    subject = trained(trl_ext, tmp_path, nothing, loss_type=loss_type, packing=True)
    assert (weights(subject) - subject.before).abs().max() == 0
    for step in steps_of(subject):
        assert step["frac_reward_zero_std"] == 1
        assert step["loss"] == 0 and step["grad_norm"] == 0
        assert not [key for key, value in step.items() if math.isnan(value)]


def test_weight_decay_goes_on_where_there_is_nothing_to_learn_as_it_does_in_trl(tmp_path):
    ours = trained(trl_ext, tmp_path, nothing, packing=True, weight_decay=0.1)
    theirs = trained(trl, tmp_path, nothing, weight_decay=0.1)
    assert (weights(theirs) - theirs.before).abs().max() > 0
    assert (weights(ours) - weights(theirs)).abs().max() <= 1e-7


def test_groups_that_are_alike_beside_one_that_is_not_leave_trls_weights(tmp_path):
    changes = dict(max_steps=4, gradient_accumulation_steps=4)
    ours = trained(trl_ext, tmp_path, one_of_four, packing=True, **changes)
    theirs = trained(trl, tmp_path, one_of_four, **changes)
    assert (weights(theirs) - theirs.before).abs().max() > 1e-5
    assert (weights(ours) - weights(theirs)).abs().max() <= 1e-6
    assert [step["frac_reward_zero_std"] for step in steps_of(ours)] == [
        step["frac_reward_zero_std"] for step in steps_of(theirs)
    ]
