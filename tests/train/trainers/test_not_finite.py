"""A gradient that is not finite is never stepped by: one sentence, and whole weights."""

import math

import pytest
import torch
from transformers import TrainerCallback

from tests import grpo_trainers, ppo_trainers, reward_trainers
from trl_ext.errors import GradientError

STEPS = dict(max_steps=3, save_strategy="steps", save_steps=1, learning_rate=1e-3, lr_scheduler_type="constant")
TRAINERS = {
    "grpo": lambda folder, **changes: grpo_trainers.trainer(folder, **STEPS | changes),
    "reward": lambda folder, **changes: reward_trainers.trainer(folder, **STEPS | changes),
    "ppo": lambda folder, **changes: ppo_trainers.trainer("head", folder, **STEPS | changes),
    "ppo, separate critic": lambda folder, **changes: ppo_trainers.trainer("separate", folder, **STEPS | changes),
}


class Spoils(TrainerCallback):
    """Lets one entry of the first gradient that comes in a step be another number, and keeps the weights before it."""

    def __init__(self, trainer, parameters, number):
        self.trainer, self.number, self.before = trainer, number, None
        parameters[-1].register_hook(self.spoilt)

    def spoilt(self, gradient):
        if self.trainer.state.global_step != 1:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = self.number
        return spoilt

    def on_step_end(self, args, state, control, **kwargs):
        self.before = ppo_trainers.trained_weights(self.trainer)


def check(trainer, parameters, number, words, folder):
    spoils = Spoils(trainer, parameters, number)
    trainer.add_callback(spoils)
    with pytest.raises(GradientError) as caught:
        trainer.train()
    sentence = str(caught.value)
    assert sentence.startswith(f"The norm of the {words} is {number} in step 2, at a learning rate of 0.001.")
    assert "The last whole checkpoint is checkpoint-1." in sentence
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    return spoils.before


@pytest.mark.parametrize(
    ("made", "max_grad_norm"),
    [(made, norm) for made in TRAINERS.values() for norm in (1.0, 0.0)],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_step_is_not_taken_by_a_gradient_that_is_not_finite(made, max_grad_norm, tmp_path):
    trainer, number = made(tmp_path, max_grad_norm=max_grad_norm), math.nan if max_grad_norm else math.inf
    actor = [p for n, p in trainer.model.named_parameters() if p.requires_grad and "value_head" not in n]
    before = check(trainer, actor, number, "gradient", tmp_path)
    after = ppo_trainers.trained_weights(trainer)
    for name in after:
        if not name.startswith("value_model."):  # a separate critic has taken its own step
            assert torch.equal(after[name], before[name])
        assert after[name].isfinite().all()


def test_a_separate_critics_gradient_is_looked_at_by_itself(tmp_path):
    trainer = ppo_trainers.trainer("separate", tmp_path, **STEPS)
    own = [p for p in trainer._critic.parameters() if p.requires_grad]
    before = check(trainer, own, math.nan, "critic's gradient", tmp_path)
    assert ppo_trainers.distance(ppo_trainers.trained_weights(trainer), before) == 0.0
