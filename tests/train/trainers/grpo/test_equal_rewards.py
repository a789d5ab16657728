"""Groups of equal rewards teach nothing, whatever the rewards are: float32 makes a deviation of 6e-8 of eight 0.7."""

from pathlib import Path

import pandas as pd
import pytest
import torch
import trl
from transformers.utils import logging

import trl_ext
from tests import grpo_trainers, ppo_trainers, tiny
from tests.grpo_trainers import steps_of, weights
from tests.half_precision import cast
from tests.nightly import daily

GROUP = dict(num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, adam_epsilon=1e-8)
NOTE = "No completion of this step has an advantage: "


def constant(value):
    def reward(completions, **_):
        return [value] * len(completions)

    return reward


def measure(completion_ids, **_):
    """Differs within a group."""
    return [float(len(ids)) for ids in completion_ids]


def moved(trainer) -> float:
    before = weights(trainer)
    trainer.train()
    return (weights(trainer) - before).abs().max().item()


WAYS = {
    "0.7": (constant(0.7), {}),
    "a third": (constant(1 / 3), {}),
    "-1.2": (constant(-1.2), dict(scale_rewards="batch")),
    "0.5": (constant(0.5), {}),
    "0.1": (constant(0.1), {}),
    "0.3": (constant(0.3), dict(scale_rewards="none")),
    "float16": (constant(torch.tensor(0.7, dtype=torch.float16)), {}),
    "weights": ([constant(0.7), constant(1 / 3), measure], dict(reward_weights=[0.1, 0.2, 0.0])),
    "each normalised": (
        [constant(0.7), constant(-1.2), measure],
        dict(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.7, 0.0]),
    ),
}


DAILY = ("0.7", "-1.2", "weights", "each normalised")


@pytest.mark.parametrize("way", daily(WAYS, *DAILY))
def test_a_run_of_equal_rewards_moves_no_weight_and_says_so(way, tmp_path, caplog):
    logging.enable_propagation()
    rewards, changes = WAYS[way]
    trainer = grpo_trainers.trainer(tmp_path, rewards=rewards, log_completions=True, **GROUP | changes)
    assert moved(trainer) == 0.0
    assert sum(message.startswith(NOTE) for message in caplog.messages) == 1
    for entry in steps_of(trainer):
        assert entry["frac_reward_zero_std"] == entry["packing/skipped_rows_frac"] == 1.0
        assert entry["loss"] == entry["grad_norm"] == 0.0
    tables = [pd.read_parquet(path) for path in Path(tmp_path, "completions").glob("*.parquet")]
    assert tables and all((table["advantage"] == 0).all() for table in tables)


@pytest.mark.parametrize("autocast", [True, False])
def test_it_moves_none_in_bf16(autocast, tmp_path):
    model = cast(tiny.model("llama"), torch.float32 if autocast else torch.bfloat16)
    trainer = grpo_trainers.trainer(tmp_path, model=model, rewards=constant(0.7), bf16=autocast, **GROUP)
    assert moved(trainer) == 0.0


def test_a_penalty_still_counts_as_in_trl_where_0_is_exact(tmp_path):
    changes = dict(beta=0.1, num_iterations=2, weight_decay=0.1, max_steps=3, **GROUP | dict(adam_epsilon=1e-3))
    cases = ((trl_ext, 0.7), (trl, 0.5))
    ours, theirs = (
        grpo_trainers.trained(tmp_path / one.__name__, one, rewards=constant(earned), **changes)
        for one, earned in cases
    )
    assert (weights(theirs) - theirs.before).abs().max() > 1e-5
    assert (weights(ours) - weights(theirs)).abs().max() <= grpo_trainers.WEIGHT_TOLERANCE


def slightly_apart(completion_ids, **_):
    """A difference of 2e-5 of the reward, which is 20 times the bound."""
    return [0.7 + 1.4e-5 * (len(ids) % 2) for ids in completion_ids]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_small_difference_is_learned_as_in_trl(scale, tmp_path):
    changes = dict(rewards=slightly_apart, scale_rewards=scale, **GROUP)
    ours, theirs = (grpo_trainers.trained(tmp_path, one, **changes) for one in (trl_ext, trl))
    assert steps_of(ours)[0]["frac_reward_zero_std"] == steps_of(theirs)[0]["frac_reward_zero_std"] == 0.0
    assert (weights(theirs) - theirs.before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    torch.testing.assert_close(weights(ours), weights(theirs), atol=5e-6, rtol=0)


def test_only_groups_that_differ_are_forwarded(tmp_path):
    def half(prompts, completion_ids, **_) -> list[float]:
        apart = measure(completion_ids)
        return [one if len(text.split()) > 5 else 0.7 for text, one in zip(prompts, apart, strict=True)]

    trainer = grpo_trainers.trained(tmp_path, rewards=half, **GROUP | dict(gradient_accumulation_steps=4))
    for entry in steps_of(trainer):
        assert 0 < entry["frac_reward_zero_std"] == entry["packing/skipped_rows_frac"] < 1


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_ppos_group_estimators_learn_nothing_of_equal_rewards_either(estimator, tmp_path):
    changes = dict(advantage_estimator=estimator, num_generations=8, per_device_train_batch_size=8, beta=0.0)
    trainer = ppo_trainers.trainer("none", tmp_path, reward_funcs=constant(0.7), adam_epsilon=1e-8, **changes)
    assert moved(trainer) == 0.0
    for entry in steps_of(trainer):
        assert entry["frac_reward_zero_std"] == entry["packing/skipped_rows_frac"] == 1.0
