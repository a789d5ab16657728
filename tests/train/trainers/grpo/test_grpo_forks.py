"""Completions that fork train the weights that TRL trains, and their common beginnings are forwarded once."""

import pytest
import trl

import trl_ext
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, trained, trainer
from tests.nightly import nightly
from tests.rollouts import forked_rollout
from trl_ext.trainers.step import score
from trl_ext.trainers.step.forward import StepForward

SETTINGS = dict(
    max_steps=3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=48,
    rollout_func=forked_rollout,
)


def spoken(ids):
    """[T] 1 where the policy speaks: of each five tokens the second is a tool's, and never the last."""
    return [int(i % 5 != 1 or i == len(ids) - 1) for i in range(len(ids))]


def with_tools(given, trainer):
    output = forked_rollout(given, trainer)
    return output | {"env_mask": [spoken(ids) for ids in output["completion_ids"]]}


@pytest.mark.parametrize(
    "changes",
    [
        dict(loss_type="grpo"),
        dict(loss_type="dapo", beta=0.1, num_iterations=2),
        dict(rollout_func=with_tools, max_tokens_per_forward=90),
        dict(max_tokens_per_forward=60, steps_per_generation=4),  # hardly more than one row
        nightly(dict(loss_type="bnpo", max_tokens_per_forward=60)),
        nightly(dict(entropy_coef=0.01)),
        nightly(dict(family="mistral_window", max_tokens_per_forward=90)),
    ],
    ids=lambda changes: ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in changes.items()),
)
def test_three_steps_are_trls(changes, tmp_path):
    family = changes.pop("family", "llama")
    theirs = trained(
        tmp_path, trl, family, **SETTINGS | {k: v for k, v in changes.items() if k != "max_tokens_per_forward"}
    )
    ours = trained(tmp_path, trl_ext, family, **SETTINGS | changes, packing=True)
    assert (learned(ours) - learned(theirs)).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("budget", [None, 90])
def test_forwards_hold_fewer_tokens_than_were_planned_by_prompts(budget, tmp_path, monkeypatch):
    planned, forwarded = [], []
    rows_of, tokens_of_row = StepForward.batch, score.forward

    def batch(self):
        planned.append(self.num_tokens)
        return rows_of(self)

    def forward(model, packed, *options):
        forwarded.append(packed.num_tokens)
        return tokens_of_row(model, packed, *options)

    monkeypatch.setattr(StepForward, "batch", batch)
    monkeypatch.setattr(score, "forward", forward)
    settings = SETTINGS | dict(max_steps=1, max_tokens_per_forward=budget, packing=True)
    ours = trainer(tmp_path, **settings)
    forwarded.clear()  # those of the self-check
    ours.train()
    assert len(planned) == len(forwarded) and all(a >= b for a, b in zip(planned, forwarded, strict=True))
    assert budget is None or max(planned) <= budget
    assert sum(forwarded) < (0.5 if budget is None else 0.9) * sum(planned)
