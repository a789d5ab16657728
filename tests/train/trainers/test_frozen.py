"""A model of which nothing is trained is refused before the first rollout, and no loss without gradient passes."""

import pytest
from peft import LoraConfig, PeftModel, get_peft_model

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.nightly import daily
from tests.preferences import reward_model
from trl_ext.errors import ConfigError


def adapter(model, folder, make, is_trainable=False):
    """The model with an adapter that was saved before, as an SFT run leaves it; `make` makes the model again."""
    get_peft_model(make(), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=is_trainable)


def trainable_adapter(*given):
    return adapter(*given, is_trainable=True)


def idle_adapter(model, folder, make):
    """A frozen adapter that is active, and a trainable one that is not."""
    made = adapter(model, folder, make)
    made.load_adapter(folder / "adapter", "other", is_trainable=True)
    return made


def weights(model, folder, make):
    return model.requires_grad_(False)


def never(prompts, trainer):
    raise AssertionError("a rollout was made")


def actor(folder, freeze):
    model = freeze(tiny.model("llama"), folder, lambda: tiny.model("llama"))
    return dict(model=model) | ({} if freeze is trainable_adapter else dict(rollout_func=never))


def reward(folder, freeze):
    def make():
        return reward_model(folder / "base")

    return reward_trainers.trainer(folder, model=freeze(make(), folder, make), max_steps=1)


TRAINERS = {
    "grpo": lambda folder, freeze: grpo_trainers.trainer(folder, **actor(folder, freeze)),
    "reward": reward,
    "ppo head": lambda folder, freeze: ppo_trainers.trainer("head", folder, **actor(folder, freeze)),
    "ppo separate": lambda folder, freeze: ppo_trainers.trainer("separate", folder, **actor(folder, freeze)),
}


@pytest.mark.parametrize("freeze", daily([adapter, idle_adapter, weights], adapter))
@pytest.mark.parametrize("made", TRAINERS.values(), ids=TRAINERS)
def test_a_frozen_model_is_refused_with_what_to_do(made, freeze, tmp_path):
    with pytest.raises(ConfigError, match=r"^No weight of the (model|policy) is trained: .*is_trainable=True"):
        made(tmp_path, freeze).train()


@pytest.mark.parametrize("made", TRAINERS.values(), ids=TRAINERS)
def test_an_adapter_that_is_trainable_learns(made, tmp_path):
    subject = made(tmp_path, trainable_adapter)
    before = ppo_trainers.trained_weights(subject)
    subject.train()
    assert ppo_trainers.distance(before, ppo_trainers.trained_weights(subject)) > 0


def test_a_frozen_critic_is_refused(tmp_path):
    subject = ppo_trainers.trainer("separate", tmp_path, value_model=ppo_trainers.classifier().requires_grad_(False))
    with pytest.raises(ConfigError, match=r"^No weight of the critic is trained"):
        subject.train()
