"""Trains GRPO, or PPO with a critic, for four steps on samples of stand-in servers, and saves the weights.

`test_ahead_zero.py` starts this script with `generation_ahead: 1`, and as one process that waits for servers whose
weights are one block old.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import sampling_servers
from tests.multi.programs.zero_worker import token_reward
from tests.ppo_trainers import LORA
from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer

NUM_STEPS = 4


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--kind", required=True, help="grpo, or PPO's critic")
    parser.add_argument("--ahead", type=int, required=True)
    parser.add_argument("--resume_from", help="a checkpoint of this script")
    return parser.parse_args()


def made(options: argparse.Namespace, value_model):
    is_ppo = options.kind != "grpo"
    critic = dict(critic=options.kind, response_length=6, kl_coef=0.05, num_ppo_epochs=1) if is_ppo else {}
    config = (PPOConfig if is_ppo else GRPOConfig)(
        output_dir=options.output_dir,
        **critic,
        **({} if is_ppo else {"max_completion_length": 6}),
        generation_ahead=options.ahead,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_vllm=True,
        vllm_mode="server",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4 // options.num_processes,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        adam_epsilon=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": [f"word{number} word{number + 2}" for number in range(16)]})
    if is_ppo:
        given = {"peft_config": LoraConfig(**LORA)} if options.kind == "adapter" else {}
        given |= {"value_model": value_model} if options.kind == "separate" else {}
        return PPOTrainer(config, None, options.model, train_dataset=data, reward_funcs=token_reward, **given)
    return GRPOTrainer(options.model, token_reward, config, data)


def main() -> None:
    options = parse_options()
    servers = sampling_servers.SamplingServers if options.ahead else sampling_servers.BehindServers
    policy = AutoModelForCausalLM.from_pretrained(options.model)  # before ZeRO-3 divides whatever is loaded
    servers.policy_of = staticmethod(lambda: policy)
    sampling_servers.install(pytest.MonkeyPatch(), servers)
    torch.manual_seed(0)
    value_model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1)
    trainer = made(options, value_model)
    trainer.train(options.resume_from)
    trainer.save_model(options.output_dir)
    if trainer.is_world_process_zero():
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        facts = {"behind": [entry.get("sampling/steps_behind") for entry in log], "loss": [e["loss"] for e in log]}
        (Path(options.output_dir) / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
