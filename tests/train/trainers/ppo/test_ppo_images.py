"""PPO on rows with images: policy and critic learn packed what they learn of TRL's padded forwards."""

import pytest
import torch
from peft import LoraConfig

import trl_ext
from tests import ppo_trainers, tiny_images
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, weights
from tests.tiny_images import image, rows
from trl_ext.errors import ConfigError

SHOWN = [[image(1), image(2, 24, 16)], [image(3, 16, 24)], [image(5)], [image(4)]]


def trainer(critic, folder, family="qwen2_5_vl", **changes):
    settings = {**ppo_trainers._SETTINGS, "critic": critic, "kl_coef": 0.0, "per_device_train_batch_size": 4}
    options = {"peft_config": LoraConfig(**ppo_trainers.LORA)} if critic == "adapter" else {}
    made = trl_ext.PPOTrainer(
        trl_ext.PPOConfig(str(folder), **settings | changes),
        tiny_images.processor(),
        tiny_images.model(family),
        reward_funcs=ppo_trainers.reward,
        train_dataset=rows(SHOWN * 2),
        rollout_func=tiny_images.completions,
        **options,
    )
    return ppo_trainers.stir(made)


def trained(*given, **changes):
    subject = trainer(*given, **changes)
    subject.before = weights(subject)
    subject.train()
    return subject


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_weights_are_those_of_padded_batches(family, tmp_path):
    packed, padded = (trained("head", tmp_path, family, packing=packing) for packing in (True, False))
    assert packed._packs and not padded._packs
    assert (learned(packed) - learned(padded)).abs().max() <= WEIGHT_TOLERANCE


def test_a_critic_with_forwards_of_its_own_sees_the_images(tmp_path, monkeypatch):
    subject = trainer("adapter", tmp_path, packing=True)
    calls = []
    tower = subject.model.get_base_model().base_model.visual
    tower.register_forward_pre_hook(lambda _tower, given: calls.append((len(given[0]), torch.is_grad_enabled())))
    subject.train()
    of_updates = [patches for patches, has_gradient in calls if has_gradient]
    # Three steps, each of all images once for the actor and once for the critic.
    assert sum(of_updates) == 3 * 2 * (16 + 24 + 24 + 16 + 16)


def test_a_critic_whose_padded_forwards_lack_the_images_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"critic='adapter' reads images in packed rows only, .* packing is off"):
        trainer("adapter", tmp_path, packing=False)
