"""Named plans, frozen: the six cases that users asked about, and one for every size of card.

A preset is a job with the number that it was chosen for, and beside it the obvious settings with the number that
refuses them. A test computes both again and holds them within 2 %. All numbers are estimated. Lengths and batch are
the preset's; for others ask `plan`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.estimate import Estimate, estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.planner import Plan, Plans, Refusal
from trl_ext.memory.planner.search import Search

_PPO = {"critic": "adapter", "reward_model": "adapter", "num_generations": 1, "beta": 0.05, "method": "lora"}
_PPO_FULL = {"method": "full", "critic": "separate", "reward_model": "copy", "zero_stage": 2}
_PPO_FULL |= {"per_device_train_batch_size": 1, "checkpoint_every": 1, "steps_per_generation": 0}
_2K = {"max_prompt_length": 1024, "max_completion_length": 1024}
_8K = {"max_prompt_length": 1024, "max_completion_length": 7168}
_ASLEEP = {"use_vllm": True, "vllm_enable_sleep_mode": True}
_AWAKE = {"use_vllm": True, "vllm_enable_sleep_mode": False}
_FP32_DDP = {"zero_stage": 0, "dtype": "float32", "use_vllm": False, "gradient_as_bucket_view": False}


@dataclass(frozen=True, slots=True)
class Preset:
    """A frozen plan.

    Args:
        purpose: What it is for, in a line.
        trainer, model, gpus: As in `trl-ext plan`.
        settings: Fields of `Job`.
        peak_gib: Estimated peak a GPU.
        obvious: Fields that turn the job into what one would have tried first; empty if there is nothing to say.
        obvious_gib: Its estimated peak, more than the card has.
        why: Why the obvious one does not fit, in a sentence.
    """

    purpose: str
    trainer: str
    model: str
    gpus: str
    settings: Mapping[str, Any]
    peak_gib: float
    obvious: Mapping[str, Any] = field(default_factory=dict)
    obvious_gib: float = 0.0
    why: str = ""

    @property
    def job(self) -> Job:
        return Job(self.trainer, **self.settings)

    def plan(self) -> Plan:
        """The preset as a plan, computed now."""
        return Plan(self._estimate(self.job))

    def obvious_estimate(self) -> Estimate:
        """What the obvious settings need."""
        return self._estimate(replace(self.job, **self.obvious))

    def _estimate(self, job: Job) -> Estimate:
        return estimate(job, find_shape(self.model), parse_gpus(self.gpus))


PRESETS: dict[str, Preset] = {
    "ppo-7b-4xa100-80gb": Preset(
        "PPO of Llama-2-7B on one shared backbone",
        "ppo",
        "meta-llama/Llama-2-7b",
        "4xA100-80GB",
        {**_PPO, **_2K, "per_device_train_batch_size": 2, "checkpoint_every": 0, "zero_stage": 1},
        55.16,
        _PPO_FULL,
        103.51,
        "Policy and critic with all weights, and whole copies of reference and reward model on every card.",
    ),
    "ppo-13b-4xa100-80gb": Preset(
        "PPO of Llama-2-13B on one shared backbone",
        "ppo",
        "meta-llama/Llama-2-13b",
        "4xA100-80GB",
        {**_PPO, **_2K, "per_device_train_batch_size": 2, "checkpoint_every": 2, "zero_stage": 1},
        59.8,
        _PPO_FULL,
        198.99,
        "Policy and critic with all weights, and whole copies of reference and reward model on every card.",
    ),
    "ppo-8b-4xa40-48gb": Preset(
        "PPO of Llama-3-8B on one shared backbone, prompts and completions of 1,024",
        "ppo",
        "meta-llama/Meta-Llama-3-8B",
        "4xA40-48GB",
        {**_PPO, **_2K, "per_device_train_batch_size": 4, "steps_per_generation": 2},
        23.46,
        _PPO_FULL,
        119.92,
        "ZeRO-2 splits neither the weights of four models nor the copies of two of them.",
    ),
    "reward-8b-6x4090-8192": Preset(
        "Reward model from Llama-3-8B, LoRA 64, pairs of 2 x 8,192",
        "reward",
        "meta-llama/Meta-Llama-3-8B",
        "6x4090",
        {"method": "lora", "lora_r": 64, "max_length": 8192, "global_batch": 48, "zero_stage": 2}
        | {"activation_offloading": True},
        19.21,
        {"activation_offloading": False},
        22.59,
        "4 GiB of checkpoints are too many; ZeRO-3 would fit and gather 28 GiB over PCIe in every micro-batch.",
    ),
    "reward-8b-6x4090-4096": Preset(
        "Reward model from Llama-3-8B, LoRA 64, pairs of 2 x 4,096",
        "reward",
        "meta-llama/Meta-Llama-3-8B",
        "6x4090",
        {"method": "lora", "lora_r": 64, "max_length": 4096, "global_batch": 48, "zero_stage": 2},
        18.67,
        {"zero_stage": 0, "dtype": "float32"},
        38.13,
        "TRL loads the frozen base in float32.",
    ),
    "grpo-7b-2xa100-40gb": Preset(
        "RL of Qwen2.5-7B, LoRA, up to 2,048 tokens, with vLLM",
        "grpo",
        "Qwen/Qwen2.5-7B",
        "2xA100-40GB",
        {**_2K, **_ASLEEP, "method": "lora", "zero_stage": 2, "per_device_train_batch_size": 8}
        | {"vllm_gpu_memory_utilization": 0.5},
        34.24,
        {"method": "full", "zero_stage": 3, "use_vllm": False},
        77.19,
        "16 bytes for every weight over two cards are 57 GiB a card.",
    ),
    "grpo-8b-8xa100-80gb": Preset(
        "RL of Llama-3.1-8B, all weights, up to 8,192 tokens, with vLLM",
        "grpo",
        "meta-llama/Llama-3.1-8B",
        "8xA100-80GB",
        {**_8K, **_AWAKE, "zero_stage": 2, "checkpoint_every": 2, "vllm_gpu_memory_utilization": 0.2}
        | {"vllm_tensor_parallel_size": 2},
        73.11,
        _FP32_DDP,
        195.12,
        "DDP keeps weights, gradients, buckets and Adam in float32, whole, on every card.",
    ),
    "grpo-7b-8xa100-40gb": Preset(
        "GRPO of Qwen2.5-7B, all weights, up to 2,048 tokens, with vLLM",
        "grpo",
        "Qwen/Qwen2.5-7B",
        "8xA100-40GB",
        {**_2K, **_AWAKE, "zero_stage": 3, "per_device_train_batch_size": 8, "vllm_gpu_memory_utilization": 0.26}
        | {"vllm_tensor_parallel_size": 2},
        33.77,
        _FP32_DDP,
        145.02,
        "DDP keeps weights, gradients, buckets and Adam in float32, whole, on every card.",
    ),
    "24gb": Preset(
        "GRPO of Qwen2.5-3B, LoRA, with vLLM, on one card of 24 GB",
        "grpo",
        "Qwen/Qwen2.5-3B",
        "1x4090",
        {**_2K, **_ASLEEP, "method": "lora", "per_device_train_batch_size": 4, "vllm_gpu_memory_utilization": 0.5},
        17.88,
        {"method": "full", **_FP32_DDP},
        53.98,
        "16 bytes for every weight.",
    ),
    "40gb": Preset(
        "GRPO of Qwen2.5-7B, LoRA, with vLLM, on one card of 40 GB",
        "grpo",
        "Qwen/Qwen2.5-7B",
        "1xA100-40GB",
        {**_2K, **_ASLEEP, "method": "lora", "per_device_train_batch_size": 8, "vllm_gpu_memory_utilization": 0.5},
        34.39,
        {"dtype": "float32"},
        48.57,
        "TRL loads the frozen base in float32.",
    ),
    "48gb": Preset(
        "GRPO of Qwen2.5-7B, LoRA, with vLLM, on one card of 48 GB",
        "grpo",
        "Qwen/Qwen2.5-7B",
        "1xL40S-48GB",
        {**_2K, **_ASLEEP, "method": "lora", "per_device_train_batch_size": 8, "vllm_gpu_memory_utilization": 0.5},
        36.84,
        {"dtype": "float32"},
        51.02,
        "TRL loads the frozen base in float32.",
    ),
    "80gb": Preset(
        "GRPO of Qwen2.5-14B, LoRA, with vLLM, on one card of 80 GB",
        "grpo",
        "Qwen/Qwen2.5-14B",
        "1xH100-80GB",
        {**_2K, **_ASLEEP, "method": "lora", "per_device_train_batch_size": 8, "vllm_gpu_memory_utilization": 0.5},
        67.88,
        {"dtype": "float32"},
        95.39,
        "TRL loads the frozen base in float32.",
    ),
    "96gb": Preset(
        "GRPO of Qwen2.5-14B, LoRA, with vLLM, on one card of 96 GB",
        "grpo",
        "Qwen/Qwen2.5-14B",
        "1xH20-96GB",
        {**_2K, **_ASLEEP, "method": "lora", "per_device_train_batch_size": 16, "vllm_gpu_memory_utilization": 0.6},
        85.34,
        {"dtype": "float32"},
        112.85,
        "TRL loads the frozen base in float32.",
    ),
    "141gb": Preset(
        "GRPO of Qwen2.5-7B, all weights, with vLLM, on one card of 141 GB",
        "grpo",
        "Qwen/Qwen2.5-7B",
        "1xH200-141GB",
        {**_2K, **_ASLEEP, "dtype": "float32", "per_device_train_batch_size": 2, "vllm_gpu_memory_utilization": 0.17},
        129.19,
        {"checkpoint_every": 0},
        155.56,
        "Without checkpointing every layer of 4,096 tokens is kept, and a bf16 copy of every weight.",
    ),
}


def preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        ConfigError: There is none; with the nearest names.
    """
    if name not in PRESETS:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.3) or list(PRESETS)[:3]
        raise ConfigError(f"There is no preset '{name}'. Nearest: {', '.join(near)}.")
    return PRESETS[name]


def as_plans(name: str) -> Plans:
    """The preset called `name` as an answer of the planner, with the obvious settings as what it refuses.

    Raises:
        ConfigError: There is none; with the nearest names.
    """
    one = preset(name)
    found = one.plan()
    given = frozenset({"trainer", *one.settings})
    search = Search(found.job, given, found.estimate.case.shape, found.estimate.case.hardware)
    refused = (Refusal(one.obvious_estimate(), one.why),) if one.obvious else ()
    return Plans(search, frozenset(), (found,), refused)
