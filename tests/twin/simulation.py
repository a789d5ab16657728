"""What one simulation runs: a trainer's arguments, a model's config, adapters, DeepSpeed's settings, lengths.

The one format of the twin, as JSON between two processes: a `Job` becomes one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_ext.memory.files import settings
from trl_ext.memory.job import Job

# Keys of a recipe that no simulation has: those of TRL's ModelConfig and of the script, those that say how long a run
# is and how often it generates, and those that name files.
_DROPPED_KEYS = frozenset(
    "model_name_or_path dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_task_type load_in_4bit "
    "load_in_8bit use_bnb_nested_quant attn_implementation value_model "
    "num_train_epochs max_steps total_episodes generation_batch_size steps_per_generation num_mini_batches "
    "num_ppo_epochs response_length max_length warmup_ratio warmup_steps max_completion_length do_eval "
    "num_generations_eval oversample generation_ahead curriculum "
    "output_dir run_name report_to save_strategy save_steps logging_steps deepspeed resume_from_checkpoint "
    "load_best_model_at_end push_to_hub hub_model_id hub_token log_completions logging_strategy save_total_limit "
    "use_cpu model_init_kwargs chat_template_path reward_weights".split()
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run of a trainer on fake tensors.

    Args:
        trainer: "reward", "grpo" or "ppo".
        config: The model's config.json, with its `model_type`.
        arguments: Of the trainer's config, without those that name files.
        num_gpus: Ranks of the pretended world; rank 0 is simulated.
        dtype: Of the weights as loaded.
        adapter: Arguments of PEFT's LoraConfig; empty trains all weights.
        deepspeed: DeepSpeed's JSON; None for a single process or DDP.
        reward_model: "none", or "copy" for a frozen model of the policy's shape.
        num_reward_models: Reward models of that kind; several are an ensemble of PPO.
        prompt_tokens, completion_tokens: Of every rollout: the worst case.
        num_steps: Optimizer steps. Adam's state appears in the first.
    """

    trainer: str
    config: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: int = 1
    dtype: str = "bfloat16"
    adapter: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] | None = None
    reward_model: str = "none"
    num_reward_models: int = 1
    prompt_tokens: int = 512
    completion_tokens: int = 256
    num_steps: int = 3

    @property
    def zero_stage(self) -> int:
        return int((self.deepspeed or {}).get("zero_optimization", {}).get("stage", 0))


def why_not(simulation: Simulation) -> str:
    """Say in a sentence why the twin cannot run this; "" if it can."""
    zero = (simulation.deepspeed or {}).get("zero_optimization", {})
    checks = {
        "FSDP2: the twin runs DeepSpeed's engine and DDP, not PyTorch's sharding. The formulas count it.": (
            "fsdp" in (simulation.deepspeed or {})
        ),
        "Offloading: host and card are one device on fake tensors, so the twin cannot separate them.": any(
            (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
        )
        or bool(simulation.arguments.get("activation_offloading")),
        "Quantised weights: the kernels of bitsandbytes have no fake version.": bool(
            simulation.adapter.get("quantised")
        ),
        "8-bit optimizers have no fake version.": "8bit" in str(simulation.arguments.get("optim", "")),
        "A third adapter as reward model needs its files; the twin has none.": simulation.reward_model == "adapter",
        "Compiled models and replaced kernels: fake tensors do not show what they allocate.": any(
            simulation.arguments.get(name) for name in ("torch_compile", "use_liger_kernel", "layer_kernels")
        ),
        "Shared rows without DeepSpeed: the twin builds DDP as one process, which has nobody to share with. Launch "
        "with --config_file zero1.": not simulation.deepspeed and simulation.arguments.get("sequence_parallel", 1) > 1,
        "fp16 scales the loss by what it finds in gradients, which fake ones do not have. Use bf16.": bool(
            simulation.arguments.get("fp16")
        ),
    }
    return next((sentence for sentence, is_so in checks.items() if is_so), "")


def simulation_of(job: Job, config: Mapping[str, Any], num_gpus: int) -> Simulation:
    """The simulation of a planned job, with its model's config.json."""
    recipe = settings.recipe(job, "", num_gpus)
    num_processes = num_gpus if job.zero_stage else 1
    return Simulation(
        trainer=job.trainer,
        config=dict(config),
        arguments=shortened(job.trainer, recipe, num_processes),
        num_gpus=num_gpus,
        dtype=job.dtype,
        adapter=adapter_of(recipe),
        deepspeed={"fsdp": {}} if job.fsdp else settings.deepspeed(job),
        reward_model=job.reward_model,
        num_reward_models=job.num_reward_models,
        prompt_tokens=job.max_prompt_length,
        completion_tokens=job.max_completion_length if job.generates else job.max_length,
    )


def adapter_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig from the keys of a recipe; empty without adapters."""
    if not keys.get("use_peft"):
        return {}
    targets = keys.get("lora_target_modules")
    values = {"r": keys["lora_r"], "lora_dropout": keys["lora_dropout"]}
    values |= {"lora_alpha": keys["lora_alpha"]} if "lora_alpha" in keys else {}
    values["target_modules"] = "all-linear" if targets == ["all-linear"] else targets
    return values | ({"quantised": True} if keys.get("load_in_4bit") or keys.get("load_in_8bit") else {})


def shortened(trainer: str, keys: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    """The trainer's own keys of a recipe, so that steps are short and memory is the same.

    Two micro-batches are as many as twenty: gradients are there when the second begins. Rollouts are given, so that
    the size of a group only has to divide them. Each step but the second of two epochs has its own rollouts, so that
    scoring is seen beside Adam's state.

    Args:
        trainer: "reward", "grpo" or "ppo".
        keys: Of a recipe.
        num_processes: That run: all ranks under DeepSpeed, one of DDP.
    """
    others = ("vllm", "use_vllm", "eval_")
    kept = {k: v for k, v in keys.items() if k not in _DROPPED_KEYS and not k.startswith(others)}
    kept["gradient_accumulation_steps"] = min(keys.get("gradient_accumulation_steps", 1), 2)
    if trainer == "grpo":
        kept["num_iterations"] = min(keys.get("num_iterations", 1), 2)
        # The smallest group that divides what is generated at once.
        generated = keys.get("per_device_train_batch_size", 8) * kept["gradient_accumulation_steps"] * num_processes
        kept["num_generations"] = next((size for size in range(2, generated + 1) if generated % size == 0), 2)
    if trainer == "ppo":
        kept |= {"num_iterations": 1, "num_generations": 1}
    return kept
