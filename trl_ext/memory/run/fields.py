"""A run's settings as fields of `Job`, read from the keys of a recipe or the arguments of a trainer.

`trl-ext check`, `trl-ext dryrun` and the trainers' `memory` all come through here.
"""

import os
from collections.abc import Mapping
from typing import Any

from trl_ext.memory.files.launch import engine_fields
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape

# What a plan may turn: none of it changes the optimisation.
FREE = frozenset(
    "per_device_train_batch_size steps_per_generation checkpoint_every activation_offloading dtype zero_stage offload "
    "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode ds3_gather_for_generation".split()
)
BNB_ADAM = ("adamw_bnb_8bit", "adamw_8bit")
# Arguments under another name than the field of `Job` that they decide.
DECIDED_BY = {
    "gradient_accumulation_steps": "per_device_train_batch_size",
    "generation_batch_size": "per_device_train_batch_size",
    "num_mini_batches": "per_device_train_batch_size",
    "gradient_checkpointing": "checkpoint_every",
    "gradient_checkpointing_kwargs": "checkpoint_every",
    "activation_checkpointing": "checkpoint_every",
    "activation_checkpointing_kwargs": "checkpoint_every",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
}


def run_fields(
    trainer: str,
    keys: Mapping[str, Any],
    shape: ModelShape,
    num_processes: int,
    engine: Mapping[str, Any] | None = None,
    prompt_tokens: int | None = None,
) -> dict[str, Any]:
    """Every field of `Job` that the run decides.

    Args:
        trainer: "reward", "grpo" or "ppo".
        keys: Arguments of the trainer's config and, under the names of TRL's ModelConfig, of the model: `dtype`,
            `use_peft`, `lora_r`, ...; `reward_model`, `reward_adapter` and `value_model` where there are some.
        shape: The model.
        num_processes: One for each GPU.
        engine: DeepSpeed's settings, None without DeepSpeed.
        prompt_tokens: Of the longest prompt; no trainer has an argument for it.
    """
    fields = _batch(keys, num_processes) | _model(keys, shape) | _layers(trainer, keys)
    fields |= _lengths(trainer, keys, shape, prompt_tokens)
    if trainer != "reward":
        fields |= _generation(keys)
    if trainer == "ppo":
        fields["critic"] = critic_of(keys)
    return fields | engine_fields(engine, shape)


def given_fields(given: frozenset[str]) -> frozenset[str]:
    """Fields of `Job` that given arguments decide."""
    return frozenset(DECIDED_BY.get(name, name) for name in given)


def critic_of(keys: Mapping[str, Any]) -> str:
    """PPO's, as the trainer chooses it."""
    if keys.get("critic"):
        return str(keys["critic"])
    if keys.get("value_model"):
        return "separate"
    return "adapter" if keys.get("use_peft") else "head"


def loaded_dtype(keys: Mapping[str, Any]) -> str:
    """Of the weights: float32 unless something else is asked for, as in TRL; "auto" and float16 take as much as
    bfloat16."""
    named = (keys.get("model_init_kwargs") or {}).get("dtype", keys.get("dtype")) or "float32"
    return "float32" if "float32" in str(named) else "bfloat16"


def optimizer_name(keys: Mapping[str, Any]) -> str:
    """transformers' name of the optimizer."""
    return str(getattr(keys.get("optim"), "value", keys.get("optim")))


def _batch(keys: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    micro, steps = int(keys["per_device_train_batch_size"]), int(keys["gradient_accumulation_steps"])
    batch = {"per_device_train_batch_size": micro, "global_batch": micro * steps * num_processes}
    if keys.get("global_batch"):
        batch["global_batch"] = int(keys["global_batch"])
    return batch


def _model(keys: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    is_8bit = optimizer_name(keys) in BNB_ADAM
    fields = {"optim": "adamw_bnb_8bit" if is_8bit else "adamw_torch_fused", "dtype": loaded_dtype(keys)}
    if not keys.get("use_peft"):
        return {**fields, "method": "full"}
    return {
        **fields,
        "method": "qlora" if keys.get("load_in_4bit") else "lora",
        "lora_r": keys["lora_r"],
        "lora_dropout": keys["lora_dropout"],
        "lora_target_modules": _targets(keys.get("lora_target_modules"), shape),
    }


def _targets(named: Any, shape: ModelShape) -> tuple[str, ...]:
    targets = (named,) if isinstance(named, str) else tuple(named or ())
    if "all-linear" in targets:
        return ALL_LINEAR
    return targets or _usual_targets(shape.family)


def _usual_targets(family: str) -> tuple[str, ...]:
    """PEFT's choice for the family."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES

    return tuple(CHOICES.get(family, ("q_proj", "v_proj")))


def _layers(trainer: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    # transformers before 5.23 knows the old names alone.
    is_on = keys.get("activation_checkpointing")
    is_on = keys.get("gradient_checkpointing", True) if is_on is None else is_on
    options = keys.get("activation_checkpointing_kwargs") or keys.get("gradient_checkpointing_kwargs") or {}
    fields = {
        "checkpoint_every": int(options.get("every_n_layers") or 1) if is_on else 0,
        "packing": keys.get("packing") is not False,
        "max_tokens_per_forward": keys.get("max_tokens_per_forward") or 0,
        "expandable_segments": _expands(),
    }
    if trainer == "reward":
        fields["activation_offloading"] = bool(keys.get("activation_offloading"))
    return fields


def _expands() -> bool:
    """In the environment; the recipe's block `env` has been read into it."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in (*ALLOCATOR, "PYTORCH_ALLOC_CONF"))


def _lengths(trainer: str, keys: Mapping[str, Any], shape: ModelShape, prompt_tokens: int | None) -> dict[str, Any]:
    if trainer == "reward":
        return {"max_length": keys.get("max_length") or shape.max_positions or Job("reward").max_length}
    fields = {"max_completion_length": keys.get("response_length") or keys["max_completion_length"]}
    return fields if prompt_tokens is None else {**fields, "max_prompt_length": prompt_tokens}


def _generation(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A number of steps that only says "all of an optimizer step" is left to say so: 0."""
    accumulation = int(keys["gradient_accumulation_steps"])
    steps = keys.get("steps_per_generation") or accumulation * (keys.get("num_mini_batches") or 1)
    beta = keys.get("kl_coef")
    fields = {
        "num_generations": keys["num_generations"],
        "beta": keys["beta"] if beta is None else beta,
        "steps_per_generation": 0 if steps == accumulation else steps,
        "ds3_gather_for_generation": keys.get("ds3_gather_for_generation") is not False,
        "reward_model": _reward_model(keys),
    }
    if not keys.get("use_vllm") or keys.get("vllm_mode") == "server":
        return fields
    names = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    return {**fields, "use_vllm": True, **{name: keys[name] for name in names}}


def _reward_model(keys: Mapping[str, Any]) -> str:
    """A whole one is counted as large as the policy."""
    if keys.get("reward_adapter"):
        return "adapter"
    return "copy" if keys.get("reward_model") or keys.get("reward_model_name_or_path") else "none"
