"""A run's settings as a `Job`: from a recipe's keys or a trainer's arguments, and the engine of its launch."""

import os
from collections.abc import Mapping
from typing import Any

from trl_ext.memory.contradictions import holds
from trl_ext.memory.files.launch import engine_fields
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.job import Job, changed
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape
from trl_ext.memory.options import LAYERS, OPTIONS

GUESSED_PROMPT_TOKENS = 512  # if the rows cannot be read; guesses are multiples of it
BNB_ADAM = ("adamw_bnb_8bit", "adamw_8bit")
# Arguments whose field of `Job` has another name.
DECIDED_BY = {
    "gradient_accumulation_steps": "per_device_train_batch_size",
    "generation_batch_size": "per_device_train_batch_size",
    "num_mini_batches": "per_device_train_batch_size",
    "gradient_checkpointing": "checkpoint_every",
    LAYERS: "checkpoint_every",
    "activation_checkpointing": "checkpoint_every",
    "activation_checkpointing_kwargs": "checkpoint_every",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
}


def job_of_run(
    trainer: str,
    keys: Mapping[str, Any],
    shape: ModelShape,
    num_processes: int,
    engine: Mapping[str, Any] | None = None,
    prompt_tokens: int | None = None,
) -> Job:
    """Return the run as a job of the planner; raise ConfigError if its settings contradict each other.

    Args:
        trainer: "reward", "grpo" or "ppo".
        keys: Arguments of the trainer's config and, under the names of TRL's ModelConfig, of the model: `dtype`,
            `use_peft`, `lora_r`, ...; also `reward_model` and `reward_adapter` (names, or their number) and
            `value_model`, if used.
        num_processes: One for each GPU.
        engine: DeepSpeed's settings, None without DeepSpeed.
        prompt_tokens: Tokens of the longest prompt, for which trainers have no argument; None if unknown.
    """
    micro, steps = int(keys["per_device_train_batch_size"]), int(keys["gradient_accumulation_steps"])
    fields: dict[str, Any] = {
        "trainer": trainer,
        "per_device_train_batch_size": micro,
        "global_batch": int(keys.get("global_batch") or micro * steps * num_processes),
        # fp32, which needs no bf16 either, counts as fp16.
        "fp16": bool(keys.get("fp16")) or (keys.get("bf16") is False and not keys.get("load_in_4bit")),
        "packing": False not in (keys.get("packing"), not shape.is_eager),  # runs with eager attention pad
        "layer_kernels": keys.get("layer_kernels") is not False,
        "max_tokens_per_forward": keys.get("max_tokens_per_forward") or 0,
        "sequence_parallel": keys.get("sequence_parallel") or 1,
        # Read from the environment, into which the recipe's block `env` was put.
        "expandable_segments": any(
            "expandable_segments:True" in os.environ.get(name, "") for name in (*ALLOCATOR, "PYTORCH_ALLOC_CONF")
        ),
    }
    # transformers before 5.23 knows only the old names of checkpointing.
    options = keys.get("activation_checkpointing_kwargs") or keys.get("gradient_checkpointing_kwargs") or {}
    fields["checkpoint_every"] = int(options.get("every_n_layers") or 1) if _is_checkpointed(keys) else 0
    blocks = {LAYERS: options, "": keys}
    for option in OPTIONS:
        fields[option.name] = bool(blocks[option.block].get(option.name))
        fields[option.name] &= not holds(option.conflict, fields)  # a run then goes on without the option
    fields |= _model(keys, shape) | engine_fields(engine, shape)
    if trainer == "reward":
        fields["max_length"] = keys.get("max_length") or shape.max_positions or Job("reward").max_length
    else:
        fields["max_prompt_length"] = prompt_tokens or GUESSED_PROMPT_TOKENS
        fields |= _generation(keys)
    if trainer == "ppo":
        fields["critic"] = str(keys.get("critic") or _default_critic(keys))
    return changed(Job(trainer), fields)


def _is_checkpointed(keys: Mapping[str, Any]) -> bool:
    """Return True if layers are recomputed in backward: by default, or by the new or the old key."""
    is_on = keys.get("activation_checkpointing")
    return bool(keys.get("gradient_checkpointing", True) if is_on is None else is_on)


def _default_critic(keys: Mapping[str, Any]) -> str:
    """Return the critic of a PPO run that names none."""
    if keys.get("advantage_estimator", "gae") != "gae":
        return "none"
    if keys.get("value_model"):
        return "separate"
    return "adapter" if keys.get("use_peft") else "head"


def optimizer_name(keys: Mapping[str, Any]) -> str:
    """Return transformers' name of the optimizer."""
    return str(getattr(keys.get("optim"), "value", keys.get("optim")))


def _model(keys: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    is_8bit = optimizer_name(keys) in BNB_ADAM
    # As loaded: float32 by default, as in TRL; "auto", float16 count as bfloat16.
    named = (keys.get("model_init_kwargs") or {}).get("dtype", keys.get("dtype")) or "float32"
    dtype = "float32" if "float32" in str(named) else "bfloat16"
    fields = {"optim": "adamw_bnb_8bit" if is_8bit else "adamw_torch_fused", "dtype": dtype}
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
    """Return the projections with adapters; PEFT's choice for the family if none are named."""
    targets = (named,) if isinstance(named, str) else tuple(named or ())
    if "all-linear" in targets:
        return ALL_LINEAR
    if targets:
        return targets
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES

    return tuple(CHOICES.get(shape.stands_for or shape.family, ("q_proj", "v_proj")))


def num_named(given: Any) -> int:
    """Count the names in a name, a list of names, a number or None."""
    if isinstance(given, (list, tuple)):
        return len(given)
    return int(given) if isinstance(given, int) else bool(given)


def _generation(keys: Mapping[str, Any]) -> dict[str, Any]:
    accumulation = int(keys["gradient_accumulation_steps"])
    steps = keys.get("steps_per_generation") or accumulation * (keys.get("num_mini_batches") or 1)
    beta = keys.get("kl_coef")
    # A whole reward model counts as large as the policy; an adapter has about 1 % of it.
    copies = num_named(keys.get("reward_model")) + num_named(keys.get("reward_model_name_or_path"))
    adapters = num_named(keys.get("reward_adapter"))
    fields = {
        "max_completion_length": keys.get("response_length") or keys["max_completion_length"],
        "num_generations": keys["num_generations"],
        "beta": keys["beta"] if beta is None else beta,
        # A number equal to a whole optimizer step becomes 0, which means that.
        "steps_per_generation": 0 if steps == accumulation else steps,
        "oversample": keys.get("oversample") or 1.0,
        "ds3_gather_for_generation": keys.get("ds3_gather_for_generation") is not False,
        "reward_model": "copy" if copies else "adapter" if adapters else "none",
        "num_reward_models": max(copies or adapters, 1),
    }
    if not keys.get("use_vllm"):
        return fields
    if keys.get("vllm_mode") == "server":  # its cards do not belong to the run
        ahead = keys.get("generation_ahead") or 0
        return {**fields, "use_vllm": True, "vllm_mode": "server", "generation_ahead": ahead}
    names = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    return {**fields, "use_vllm": True, **{name: keys[name] for name in names}}
