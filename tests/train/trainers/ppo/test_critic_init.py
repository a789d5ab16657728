"""A critic that starts from the reward model: what it says first, on which scale, and what it cannot start from."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from tests import ppo_trainers, tiny
from tests.ppo_trainers import distance, resumed_as_whole
from trl_ext.compat.peft import base_model
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.roles import CRITIC, REWARD

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A LoRA reward model of the actor's base, of another rank than the actor's LoRA."""
    folder = tmp_path_factory.mktemp("reward")
    ppo_trainers.actor().save_pretrained(folder / "base")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    lora = LoraConfig(**{**ppo_trainers.LORA, "r": 2}, task_type="SEQ_CLS", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def started(critic, folder, reward_folder=None, **changes):
    given = (
        dict(reward_adapter=reward_folder)
        if critic == "adapter"
        else dict(reward_model=ppo_trainers.classifier(9), reward_processing_classes=tiny.tokenizer())
    )
    settings = dict(critic_init="reward", value_normalisation=True, reward_funcs=None) | given | changes
    return ppo_trainers.trainer(critic, folder, **settings)


def test_the_adapter_critic_says_what_the_reward_adapter_says(reward_folder, tmp_path):
    trainer = started("adapter", tmp_path, reward_folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        critics, rewards = (trainer.model(input_ids=ids, role=role).token_values for role in (CRITIC, REWARD))
    torch.testing.assert_close(critics, rewards)
    assert rewards.abs().max() > 1e-3
    critic = [p for n, p in trainer.model.named_parameters() if f".{CRITIC}." in n]
    assert critic and all(p.requires_grad for p in critic)
    assert not any(p.requires_grad for n, p in trainer.model.named_parameters() if f".{REWARD}." in n)


def test_head_and_separate_critic_have_the_reward_models_score(tmp_path):
    reward_model = ppo_trainers.classifier(9)
    head = started("head", tmp_path, reward_model=reward_model)
    torch.testing.assert_close(base_model(head.model).value_head.weight, reward_model.score.weight)
    separate = started("separate", tmp_path, reward_model=reward_model)
    value_model = separate._ppo_models.value_model
    assert value_model is not reward_model
    assert distance(dict(value_model.state_dict()), dict(ppo_trainers.classifier(9).state_dict())) == 0.0


@pytest.mark.parametrize("critic", ppo_trainers.CRITICS)
def test_its_first_outputs_are_brought_to_the_scale_of_the_returns(critic, reward_folder, tmp_path):
    trainer = started(critic, tmp_path, reward_folder, kl_coef=0.0)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(8)])
    values = inputs["values"][inputs["completion_mask"].bool()]
    scale = trainer._scale
    assert values.mean().item() == pytest.approx(scale.mean, abs=1e-4)
    # Of what varies in the returns, the share that it explains by a line, and no less than half.
    assert 0.499 * scale.std < values.std(correction=0).item() <= scale.std


def test_a_resumed_run_keeps_the_scale(reward_folder, tmp_path):
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2, rollout_func=None)
    whole, again = resumed_as_whole(lambda out: started("adapter", out, reward_folder, **settings), tmp_path, 2)
    assert again._scale == whole._scale


def test_what_it_cannot_start_from_is_refused(reward_folder, tmp_path):
    with pytest.raises(ConfigError, match="from the reward_adapter, and there is none"):
        started("adapter", tmp_path, reward_adapter=None, reward_funcs=ppo_trainers.reward)
    with pytest.raises(ConfigError, match="from the reward_model, and there is none"):
        ppo_trainers.trainer("head", tmp_path, critic_init="reward")
    with pytest.raises(ConfigError, match="critic_init='reward' has no use"):
        ppo_trainers.trainer(
            "separate", tmp_path, critic_init="reward", reward_model=ppo_trainers.classifier(9),
            reward_processing_classes=tiny.tokenizer(), value_model=ppo_trainers.classifier(),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="another backbone"):
        started("head", tmp_path, reward_model=ppo_trainers.classifier(9, hidden_size=32))
    with pytest.raises(ConfigError, match="critic_init='base' is unknown"):
        ppo_trainers.trainer("head", tmp_path, critic_init="base")
