"""A tiny run of each trainer in which everything that a checkpoint must hold moves, and what such a run came to."""

import hashlib
import json
import random
import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification
from trl.generation.vllm_client import VLLMClient

import trl_ext
from tests import sampling_servers, tiny
from tests.ppo_trainers import LORA, prompts, reward, stir, trained_weights
from tests.preferences import words
from trl_ext.rewards import Length
from trl_ext.trainers.generation.vllm_servers import PendingGeneration

# Of two layers with 16 numbers a token: a step takes 30 ms and a checkpoint 100 kB.
SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
OUTPUT_DIR = "out"  # relative: a run is in whichever folder it works in
STEPS = 10  # reach the second epoch and the third round of rollouts
KINDS = ("grpo", "reward", "ppo_head", "ppo_separate", "ppo_adapter", "grpo_ahead")
COMMON = dict(
    **tiny.QUIET_ON_CPU,
    max_steps=STEPS,
    save_steps=1,
    save_total_limit=2,
    logging_steps=1,
    learning_rate=3e-3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
)
# Four optimizer steps a round of rollouts: two passes over four micro-batches.
GRPO = dict(num_generations=4, steps_per_generation=4, num_iterations=2, max_completion_length=6, beta=0.05)
AHEAD = dict(generation_ahead=1, use_vllm=True, vllm_mode="server")
PPO = dict(
    num_ppo_epochs=2,
    num_mini_batches=2,
    response_length=6,
    temperature=1.0,
    kl_coef=0.1,
    kl_target=0.5,
    kl_horizon=100,
    score_normalisation="running",
    score_clip=2.0,
)
# Seconds, and what depends on them or on the machine.
_NOT_COMPARED = re.compile(r"phase/.*|memory/.*|train_.*|step_time|.*_m?s")


def trainer(kind: str, library: Any = trl_ext, **changes: Any) -> Any:
    """Return a trainer that has not begun.

    Args:
        kind: One of KINDS.
        library: trl_ext, or trl for a run of TRL's own.
        changes: Of the settings; `model`, `reward_model`, `rules`, `rows`, `eval_dataset`, `processing_class` and
            `peft_config` are the trainer's arguments.
    """
    if kind == "grpo_ahead":
        sampling_servers.install(pytest.MonkeyPatch(), ServersAtOnce)
        return trainer("grpo", library, **AHEAD | changes)
    model, held_out = changes.pop("model", None), {"eval_dataset": changes.pop("eval_dataset", None)}
    tokenizer = changes.pop("processing_class", None) or tiny.tokenizer()
    if kind == "reward":
        given = {"train_dataset": changes.pop("rows", None) or pairs(), "processing_class": tokenizer}
        if "peft_config" in changes:
            given["peft_config"] = changes.pop("peft_config")
        args = library.RewardConfig(OUTPUT_DIR, **COMMON | changes)
        return library.RewardTrainer(model or classifier(3), args, **given, **held_out)
    rows = changes.pop("rows", None) or prompts(8 if kind == "grpo" else 16)
    if kind == "grpo":
        rules = changes.pop("rules", None) or [length_rules(), reward]
        given = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
        args = library.GRPOConfig(OUTPUT_DIR, **COMMON | GRPO | changes)
        given |= {"processing_class": tokenizer} | held_out
        return library.GRPOTrainer(model or saved_actor(), rules, args, rows, **given)
    critic = kind.removeprefix("ppo_")
    given = {"reward_funcs": changes.pop("rules", reward)}
    if critic == "adapter":
        given["peft_config"] = LoraConfig(**LORA)
    if critic == "separate":
        given["value_model"] = classifier(5)
    rewarding = changes.pop("reward_model", None) or classifier(9)
    given |= dict(reward_model=rewarding, reward_processing_classes=tiny.tokenizer(), train_dataset=rows) | held_out
    args = library.PPOConfig(OUTPUT_DIR, critic=critic, **COMMON | PPO | changes)
    return stir(library.PPOTrainer(args, tokenizer, model or actor(), **given))


class ServersAtOnce(sampling_servers.SamplingServers):
    """Servers whose answers are there at once: a fork has no threads."""

    policy_of = staticmethod(lambda: actor())

    def submit(self, prompts: Any, version: int, on_answer: Any = None) -> None:
        self.pending = PendingGeneration(prompts, self._sampling, version)
        self.pending.end(VLLMClient.generate(self, prompts, **self.pending.sampling))


def actor(seed: int = 0, **changes: Any) -> Any:
    """A causal model whose head can make a token likely: with initial weights of 0.02 all are equally likely."""
    model = tiny.model("llama", seed, **SMALL | changes)
    model.lm_head.weight.data *= 10
    return model


def saved_actor(folder: Any = "actor", seed: int = 0, **changes: Any) -> str:
    """Save `actor`, for a reference that TRL loads by name; return its folder."""
    actor(seed, **changes).save_pretrained(folder)
    return str(folder)


def classifier(seed: int, **changes: Any) -> Any:
    """A reward or value model."""
    config = tiny.model("llama", **SMALL | changes).config
    config.num_labels = 1
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def length_rules(high: int = 3, normalise: bool = True) -> Any:
    """Rules with running statistics."""
    return trl_ext.RuleSet([Length(high=high, slack=3)], normalise=normalise)


def pairs(seed: int = 0) -> Dataset:
    """Six steps of eight pairs each, so that a run reaches the second epoch."""
    draw = random.Random(seed)
    names = ("prompt", "chosen", "rejected")
    rows = [{name: words(draw, 12) for name in names} for _ in range(48)]
    return Dataset.from_list([row | {"prompt": row["prompt"] + " "} for row in rows])


# What a run came to -----------------------------------------------------------------------------------------------


def outcome(trainer: Any) -> dict[str, Any]:
    """Everything that two equal runs have equal, in texts: weights, optimizers, statistics, randomness and logs."""
    critic = getattr(trainer, "_critic", None)
    states = {
        "weights": trained_weights(trainer),
        "optimizer": trainer.optimizer.state_dict(),
        "critic's optimizer": getattr(getattr(critic, "optimizer", None), "state_dict", dict)(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "rules": [rules.state_dict() for rules in getattr(trainer, "reward_funcs", ()) if hasattr(rules, "normalise")],
        "randomness": torch.get_rng_state(),
    }
    if trainer.state.global_step == trainer._initial_global_step:
        states["randomness"] = None  # restored at the first step, and there was none
    logs = [_compared(log) for log in trainer.state.log_history if "loss" in log]
    digests = {name: None if state is None else _digest(state) for name, state in states.items()}
    return {"steps": trainer.state.global_step, "logs": logs} | digests


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs; of the logs, the first step that does."""
    found = [name for name in one if name != "logs" and one[name] != other[name] and other[name] is not None]
    steps = [log["step"] for log, twin in zip(one["logs"], other["logs"], strict=False) if log != twin]
    if steps:
        found.append(f"log of step {steps[0]}")
    elif len(one["logs"]) != len(other["logs"]):
        found.append(f"{len(one['logs'])} logs against {len(other['logs'])}")
    return found


def _compared(log: dict[str, Any]) -> dict[str, Any]:
    # As text: a NaN equals itself there.
    return {n: v if n == "step" else repr(v) for n, v in log.items() if not _NOT_COMPARED.fullmatch(n)}


def _digest(state: Any) -> str:
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            sha.update(json.dumps(value, default=str).encode())

    add(state)
    return sha.hexdigest()
