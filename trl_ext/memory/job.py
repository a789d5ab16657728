"""What is trained and how: every setting that memory depends on, checked where they contradict each other.

Fields that are arguments of a trainer carry the trainer's name for them. `zero_stage`, `offload` and the bucket sizes
land in DeepSpeed's file, `method` and `dtype` in the model's arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape, lora_linears

CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": ("reward", "grpo", "ppo"),
    "method": ("full", "lora", "qlora"),
    "critic": ("adapter", "head", "separate"),
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "all"),
    "dtype": ("bfloat16", "float32"),
    "optim": ("adamw_torch_fused", "adamw_bnb_8bit"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One training run.

    Args:
        trainer: "reward", "grpo" or "ppo".
        method: "full" trains all weights, "lora" adapters, "qlora" adapters on a 4-bit base.
        critic: Of PPO: "adapter" a second LoRA on the same backbone, "head" a value head on the actor's hidden
            states, "separate" a value model trained as the policy is, by its own optimizer.
        reward_model: "none"; "adapter", a third LoRA; or "copy", a frozen model of the policy's shape.
        beta: Weight of the KL penalty; a GRPO run without it has no reference. PPO always has one.
        global_batch: Samples of one optimizer step over all GPUs: pairs, or completions.
        per_device_train_batch_size: Samples of one micro-batch on one GPU.
        steps_per_generation: Micro-batches that are generated at once; 0 for all of an optimizer step, TRL's default.
        max_length: Tokens of one side of a pair.
        max_prompt_length, max_completion_length: Longest prompt and completion, in tokens.
        max_tokens_per_forward: Most tokens in a packed forward; 0 without that bound.
        packing: Flat rows without padding; padded batches cost a mask and repeated keys besides.
        num_generations: Completions per prompt.
        lora_r, lora_target_modules, lora_dropout: Of the adapters.
        zero_stage: DeepSpeed's; 0 is DDP, or no launcher on one GPU.
        offload: Nothing, the optimizer, or optimizer and weights ("all", ZeRO-3) in host memory.
        checkpoint_every: Every n-th layer is checkpointed; 0 for none.
        activation_offloading: Checkpoints wait in host memory (TRL's reward trainer alone has it).
        dtype: In which weights are loaded. Adapters are float32 under DDP either way.
        optim: The optimizer, by transformers' name.
        reduce_bucket_size, stage3_max_live_parameters, stage3_prefetch_bucket_size, sub_group_size: DeepSpeed's, in
            elements.
        ds3_gather_for_generation: Gather all weights of ZeRO-3 before generating.
        use_vllm, vllm_gpu_memory_utilization, vllm_tensor_parallel_size, vllm_enable_sleep_mode: vLLM on the training
            GPUs.
        gradient_as_bucket_view: DDP's gradients live in its buckets, as our trainers set it; TRL's are there twice.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF says so; less fragmentation.
    """

    trainer: str
    method: str = "full"
    critic: str = "separate"
    reward_model: str = "none"
    beta: float = 0.0
    global_batch: int = 64
    per_device_train_batch_size: int = 1
    steps_per_generation: int = 0
    max_length: int = 1024
    max_prompt_length: int = 512
    max_completion_length: int = 256
    max_tokens_per_forward: int = 0
    packing: bool = True
    num_generations: int = 8
    lora_r: int = 16
    lora_target_modules: tuple[str, ...] = ALL_LINEAR
    lora_dropout: float = 0.0
    zero_stage: int = 0
    offload: str = "none"
    checkpoint_every: int = 1
    activation_offloading: bool = False
    dtype: str = "bfloat16"
    optim: str = "adamw_torch_fused"
    reduce_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 100_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    sub_group_size: int = 100_000_000
    ds3_gather_for_generation: bool = True
    use_vllm: bool = False
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool = False
    gradient_as_bucket_view: bool = True
    expandable_segments: bool = True

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def generates(self) -> bool:
        return self.trainer != "reward"

    @property
    def uses_lora(self) -> bool:
        return self.method != "full"

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_length + self.max_completion_length if self.generates else self.max_length

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch, padding included and no prompt shared: the worst case."""
        sequences = self.per_device_train_batch_size * (1 if self.generates else 2)
        return sequences * self.sequence_tokens

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest forward."""
        is_bounded = self.packing and self.max_tokens_per_forward
        # A sequence longer than the bound gets a forward of its own.
        bound = max(self.max_tokens_per_forward, self.sequence_tokens)
        return min(self.micro_batch_tokens, bound) if is_bounded else self.micro_batch_tokens

    @property
    def held_tokens(self) -> int:
        """Tokens whose graph waits for one backward: with GRPO and PPO of all forwards of the micro-batch; the reward
        trainer's forwards are micro-batches of their own."""
        return self.micro_batch_tokens if self.generates else self.forward_tokens

    @property
    def scored_tokens(self) -> int:
        """Tokens of a micro-batch whose log-probability is asked for."""
        return self.per_device_train_batch_size * self.max_completion_length

    def accumulation(self, num_gpus: int) -> int:
        """Micro-batches of an optimizer step on one GPU."""
        return self.global_batch // (self.per_device_train_batch_size * num_gpus)

    def num_backwards(self, num_gpus: int) -> int:
        """Backward passes of an optimizer step on one GPU: each adds its gradients to those of the ones before."""
        return self.accumulation(num_gpus) * -(-self.micro_batch_tokens // self.held_tokens)

    def generated_at_once(self, num_gpus: int) -> int:
        """Completions that one GPU generates at once."""
        steps = self.steps_per_generation or self.accumulation(num_gpus)
        return self.per_device_train_batch_size * steps


def check_values(job: Job) -> None:
    """Settings that cannot work whatever the model and the cards are.

    Raises:
        ConfigError: Which, and what to do.
    """
    for name, choices in CHOICES.items():
        if getattr(job, name) not in choices:
            raise ConfigError(f"{name} is {getattr(job, name)!r}. Use one of {', '.join(map(str, choices))}.")
    positive = ["global_batch", "per_device_train_batch_size", "lora_r", "reduce_bucket_size", "sub_group_size"]
    positive += ["max_prompt_length", "max_completion_length", "num_generations"] if job.generates else ["max_length"]
    for name in positive:
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}. It must be at least 1.")
    for is_wrong, sentence in _contradictions(job):
        if is_wrong:
            raise ConfigError(sentence)


def _contradictions(job: Job) -> list[tuple[bool, str]]:
    adapters = job.trainer == "ppo" and (job.critic == "adapter" or job.reward_model == "adapter")
    return [
        (
            adapters and not job.uses_lora,
            f"critic={job.critic}, reward_model={job.reward_model} and method=full: adapters need LoRA. Allow lora, "
            "or set critic=separate and reward_model=copy.",
        ),
        (
            adapters and job.zero_stage == 3,
            "Several adapters on one backbone under ZeRO-3: the order of layers changes between roles, which its "
            "prefetching cannot follow. Use zero_stage 0, 1 or 2.",
        ),
        (
            job.method == "qlora" and job.zero_stage == 3,
            "A 4-bit base under ZeRO-3 cannot be split by DeepSpeed. Use zero_stage 0, 1 or 2, or method=lora.",
        ),
        (
            job.offload == "all" and job.zero_stage != 3,
            f"offload=all puts weights into host memory, which is ZeRO-3's; zero_stage is {job.zero_stage}. Use "
            "offload=optimizer or zero_stage=3.",
        ),
        (
            job.offload == "optimizer" and job.zero_stage == 0,
            "offload=optimizer is DeepSpeed's, and zero_stage is 0. Use zero_stage=2 or 3.",
        ),
        (
            job.offload != "none" and job.optim != "adamw_torch_fused",
            f"optim={job.optim} does not run in host memory. Use offload=none, or leave optim alone.",
        ),
        (
            job.checkpoint_every < 0,
            f"checkpoint_every is {job.checkpoint_every}. Use 0 for no checkpointing, or 1 and more.",
        ),
        (
            job.activation_offloading and job.generates,
            f"activation_offloading is the reward trainer's, and trainer is {job.trainer}. Remove it.",
        ),
        (
            job.use_vllm and not job.generates,
            "use_vllm with a reward model: it generates nothing. Remove use_vllm.",
        ),
        (
            job.use_vllm and not 0 < job.vllm_gpu_memory_utilization < 1,
            f"vllm_gpu_memory_utilization is {job.vllm_gpu_memory_utilization}. It is a share between 0 and 1.",
        ),
    ]


def check_model(job: Job, shape: ModelShape) -> None:
    """Settings that do not go with the model.

    Raises:
        ConfigError: Lengths beyond its positions, or LoRA on projections that it lacks.
    """
    if shape.max_positions and job.sequence_tokens > shape.max_positions:
        asked = (
            f"max_prompt_length {job.max_prompt_length} + max_completion_length {job.max_completion_length}"
            if job.generates
            else f"max_length {job.max_length}"
        )
        raise ConfigError(
            f"{asked} is more than the {shape.max_positions} positions of {shape.name}. Shorten it, or take a model "
            "made for longer texts."
        )
    if job.uses_lora:
        lora_linears(shape, job.lora_target_modules)


def check_batch(job: Job, num_gpus: int) -> None:
    """A global batch that divides into micro-batches and groups.

    Raises:
        ConfigError: It does not.
    """
    if num_gpus < 1:
        raise ConfigError("There is no GPU in the plan. Give --gpus, such as 4xA40-48GB.")
    micro = job.per_device_train_batch_size * num_gpus
    if job.global_batch % micro:
        raise ConfigError(
            f"The global batch of {job.global_batch} does not divide by {num_gpus} GPUs x "
            f"{job.per_device_train_batch_size} samples. Use a multiple of {micro}."
        )
    if job.trainer == "grpo" and job.global_batch % job.num_generations:
        raise ConfigError(
            f"The global batch of {job.global_batch} completions does not divide by num_generations "
            f"{job.num_generations}. Use a multiple of {job.num_generations}."
        )


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """The job with other settings, words from a command line included.

    Raises:
        ConfigError: An unknown setting, a value of another type, or settings that cannot work together.
    """
    types = {field.name: type(getattr(job, field.name)) for field in fields(job)}
    for name in settings:
        if name not in types:
            near = get_close_matches(name, types, n=1, cutoff=0.4)
            raise ConfigError(f"'{name}' is no setting of a plan. Nearest: {near[0] if near else 'zero_stage'}.")
    return replace(job, **{name: _typed(name, value, types[name]) for name, value in settings.items()})


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is tuple:
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if kind is bool and isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{name} is '{value}'. Write true or false.")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} is '{value}', which is no {_WORDS[kind]}.") from None


_WORDS = {int: "whole number", float: "number", str: "word", bool: "true or false"}
