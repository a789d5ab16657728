"""On a CUDA card, in float32: optimizer steps on packed rows train the weights of steps on padded ones."""

import pytest
import trl

import trl_ext
from tests.gpu.card import MARKS, ON_CARD
from tests.grpo_trainers import weights_after
from tests.ppo_trainers import CRITICS, distance, stir, trained_weights
from tests.ppo_trainers import trainer as ppo_trainer
from tests.reward_trainers import trainer as reward_trainer
from tests.reward_trainers import weights

pytestmark = MARKS
FAMILIES = ["llama", "qwen3", "mistral_window"]
# Weights after two steps of a learning rate of 1e-3.
ROUNDING = 1e-5


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_forward": 48}], ids=["whole", "budget"])
@pytest.mark.parametrize("family", FAMILIES)
def test_grpo_trains_the_weights_of_trl(family, changes, tmp_path):
    settings = {"steps": 2, "family": family, "use_cpu": not ON_CARD}
    theirs = weights_after(trl, tmp_path, **settings)
    ours = weights_after(trl_ext, tmp_path, **settings, **changes)
    assert (ours - theirs).abs().max() < ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_trains_to_the_weights_of_trl(family, tmp_path):
    def after(library, **changes):
        settings = {"max_steps": 2, "use_cpu": not ON_CARD, **changes}
        subject = reward_trainer(tmp_path, library=library, model=family, **settings)
        before = weights(subject)
        subject.train()
        assert (weights(subject) - before.to(subject.model.device)).abs().max() > 1e-4
        return weights(subject)

    assert (after(trl_ext, packing=True) - after(trl)).abs().max() < ROUNDING


@pytest.mark.parametrize("critic", CRITICS)
def test_ppo_trains_the_weights_of_padded_rows_llama(critic, tmp_path):
    def after(packing):
        subject = stir(ppo_trainer(critic, tmp_path, max_steps=2, packing=packing, use_cpu=not ON_CARD))
        subject.train()
        return trained_weights(subject)

    assert distance(after(True), after(False)) < ROUNDING
