"""Half precision: the ratio of an unmoved policy is 1, and its KL to itself 0, in all updates of a rollout."""

from itertools import product

import pytest

from tests import grpo_trainers, ppo_trainers
from tests.half_precision import PRECISIONS, cast, wide_model
from tests.nightly import nightly
from tests.rollouts import forked_rollout
from trl_ext.packing import step_plan

# Four optimizer steps on each rollout, each on rows of its own, and how that is changed.
FOUR = dict(num_mini_batches=4, gradient_accumulation_steps=1, num_generations=4)
WAYS = {
    "mini-batches": dict(),
    "epochs": dict(num_mini_batches=2, num_ppo_epochs=2),
    "accumulation": dict(num_mini_batches=2, gradient_accumulation_steps=2),
    "several forwards": dict(max_tokens_per_forward=120, rollout_func=forked_rollout, response_length=48),
    "padded": dict(packing=False),
    "KL in the loss": dict(kl_term="loss", kl_estimator="k2"),
    "no KL": dict(kl_coef=0.0),
    "checkpointing": dict(gradient_checkpointing=True),
}
# By name: the critic, and the estimator of advantages.
KINDS = {critic: (critic, "gae") for critic in ppo_trainers.CRITICS}
KINDS |= {estimator: ("none", estimator) for estimator in ("rloo", "grpo", "reinforce_pp")}
HALVES = list(PRECISIONS)[1:]
DAILY = [
    ("head", "autocast", "mini-batches"),
    ("head", "bf16 weights", "padded"),
    ("separate", "bf16 weights under autocast", "several forwards"),
    ("adapter", "autocast", "accumulation"),
    ("rloo", "bf16 weights", "epochs"),
]
EVERY = list(product(KINDS, HALVES, WAYS))


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """Prompts are kept wherever a group is cut: what a call costs is of models that are larger than these."""
    monkeypatch.setattr(step_plan, "CALL_COST", 0)


def unmoved_steps(folder, kind, precision, **changes):
    """What is logged of a rollout's updates if nothing moves; so narrow a range clips every ratio but 1."""
    critic, estimator = KINDS[kind]
    dtype, autocast = PRECISIONS[precision]
    own = dict(value_model=cast(ppo_trainers.classifier(), dtype)) if critic == "separate" else {}
    changes = FOUR | changes
    num_steps = changes["num_mini_batches"] * changes.get("num_ppo_epochs", 1)
    settings = dict(
        learning_rate=0.0, cliprange=1e-9, max_steps=num_steps, advantage_estimator=estimator, bf16=autocast
    )
    trainer = ppo_trainers.trainer(critic, folder, model=cast(wide_model("qwen3"), dtype), **settings | own | changes)
    trainer.train()
    assert trainer._packs == changes.get("packing", True)
    steps = grpo_trainers.steps_of(trainer)
    assert len(steps) == num_steps
    return steps


@pytest.mark.parametrize(
    ("kind", "precision", "way"), [*DAILY, *(nightly(*case) for case in EVERY if case not in DAILY)]
)
def test_nothing_is_clipped_and_the_kl_is_zero_before_anything_moved(kind, precision, way, tmp_path):
    steps = unmoved_steps(tmp_path, kind, precision, **WAYS[way])
    assert any(step["grad_norm"] > 0 for step in steps)
    assert [step["clip_ratio/region_mean"] for step in steps] == [0.0] * len(steps)
    kls = [step[name] for step in steps for name in ("objective/kl", "loss/kl_avg") if name in step]
    assert kls and set(kls) == {0.0}
