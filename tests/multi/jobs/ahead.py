"""GRPO, or PPO with a critic, for four steps on samples of stand-in servers.

With `generation_ahead: 1`, or waiting for servers whose weights are one block old.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import sampling_servers
from tests.multi.jobs.shared import SETTINGS, num_processes, token_reward
from tests.ppo_trainers import LORA
from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from trl_ext.trainers.generation.pushes import PushWatch


def made(folder, kind: str, ahead: int, model: str, value_model):
    """`kind` is grpo, or PPO's critic."""
    is_ppo = kind != "grpo"
    own = dict(critic=kind, response_length=6, kl_coef=0.05, num_ppo_epochs=1) if is_ppo else {}
    settings = dict(
        generation_ahead=ahead,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_vllm=True,
        vllm_mode="server",
        per_device_train_batch_size=4 // num_processes(),
        gradient_accumulation_steps=2,
        num_generations=4,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
    )
    config = (PPOConfig if is_ppo else GRPOConfig)(
        str(folder), **SETTINGS | settings | (own or dict(max_completion_length=6))
    )
    data = Dataset.from_dict({"prompt": [f"word{number} word{number + 2}" for number in range(16)]})
    if not is_ppo:
        return GRPOTrainer(model, token_reward, config, data)
    given = {"peft_config": LoraConfig(**LORA)} if kind == "adapter" else {}
    given |= {"value_model": value_model} if kind == "separate" else {}
    return PPOTrainer(config, None, model, train_dataset=data, reward_funcs=token_reward, **given)


def train(folder, model: str, kind: str, ahead: int, resume_from: str | None = None) -> dict:
    servers = sampling_servers.SamplingServers if ahead else sampling_servers.BehindServers
    policy = AutoModelForCausalLM.from_pretrained(model)  # before ZeRO-3 divides whatever is loaded
    servers.policy_of = staticmethod(lambda: policy)
    patches = pytest.MonkeyPatch()
    sampling_servers.install(patches, servers)
    if not ahead:  # its servers are behind on purpose, of which the trainer knows nothing
        patches.setattr(PushWatch, "look", lambda *given: None)
    torch.manual_seed(0)
    value_model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer = made(folder, kind, ahead, model, value_model)
    trainer.train(resume_from)
    trainer.save_model(str(folder))
    return {"behind": [log.get("sampling/steps_behind") for log in trainer.state.log_history if "loss" in log]}
