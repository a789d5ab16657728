"""Every setting on which memory depends, and the checks for settings that contradict each other.

Fields that are arguments of a trainer carry the trainer's name for them. `zero_stage`, `offload` and the bucket sizes
land in DeepSpeed's file, `method` and `dtype` in the model's arguments.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape, lora_linears

CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": ("reward", "grpo", "ppo"),
    "method": ("full", "lora", "qlora"),
    "critic": ("adapter", "head", "separate", "none"),
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "all"),
    "dtype": ("bfloat16", "float32"),
    "optim": ("adamw_torch_fused", "adamw_bnb_8bit"),
    "vllm_mode": ("colocate", "server"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One training run.

    Args:
        trainer: "reward", "grpo" or "ppo".
        method: "full" trains all weights, "lora" adapters, "qlora" adapters on a 4-bit base.
        critic: PPO's value model: "adapter" a second LoRA on the same backbone, "head" a value head on the actor's
            hidden states, "separate" a model with an optimizer of its own, "none" for REINFORCE++, RLOO, ReMax.
        reward_model: "none"; "adapter", a third LoRA; or "copy", a frozen model of the policy's shape.
        num_reward_models: Reward models of that kind; several are an ensemble.
        beta: Weight of the KL penalty; a GRPO run without it has no reference. PPO always has one.
        global_batch: Samples of one optimizer step over all GPUs: pairs, or completions.
        per_device_train_batch_size: Samples of one micro-batch on one GPU.
        steps_per_generation: Micro-batches that are generated at once; 0 for all of an optimizer step, TRL's default.
        oversample: GRPO's: so many times the completions of an update are generated.
        max_length: Tokens of one side of a pair.
        max_prompt_length, max_completion_length: Longest prompt and completion, in tokens.
        max_tokens_per_forward: Most tokens in a packed forward; 0 without that bound.
        packing: True for flat rows without padding; padded batches cost a mask and repeated keys besides.
        sequence_parallel: Neighbouring GPUs that share each flat row: each forwards a part of its tokens.
        num_generations: Completions per prompt.
        lora_r, lora_target_modules, lora_dropout: Rank, projections and dropout of the adapters.
        zero_stage: DeepSpeed's stage; 0 is DDP, or no launcher on one GPU.
        offload: "none", or "optimizer", or "all" (optimizer and weights, ZeRO-3) for what lies in host memory.
        checkpoint_every: Every n-th layer is checkpointed; 0 for none.
        activation_offloading: True if checkpoints wait in host memory (TRL's reward trainer alone has it).
        dtype: The dtype in which weights are loaded. Adapters are float32 under DDP either way.
        optim: The optimizer, by transformers' name.
        reduce_bucket_size, stage3_max_live_parameters, stage3_prefetch_bucket_size, sub_group_size: DeepSpeed's
            sizes, in elements.
        ds3_gather_for_generation: True to gather all weights of ZeRO-3 before generating.
        use_vllm, vllm_gpu_memory_utilization, vllm_tensor_parallel_size, vllm_enable_sleep_mode: vLLM, its share of a
            GPU, and the GPUs that hold one copy of the model.
        vllm_mode: "colocate" for vLLM on the training GPUs, or "server" for vLLM on GPUs of its own.
        vllm_servers: Servers on GPUs of the machine; 0 for servers elsewhere, whose time is not counted.
        gradient_as_bucket_view: True if DDP's gradients live in its buckets, as our trainers set it; TRL holds them
            twice.
        expandable_segments: True if PYTORCH_CUDA_ALLOC_CONF asks for them; less fragmentation.
    """

    trainer: str
    method: str = "full"
    critic: str = "separate"
    reward_model: str = "none"
    num_reward_models: int = 1
    beta: float = 0.0
    global_batch: int = 64
    per_device_train_batch_size: int = 1
    steps_per_generation: int = 0
    oversample: float = 1.0
    max_length: int = 1024
    max_prompt_length: int = 512
    max_completion_length: int = 256
    max_tokens_per_forward: int = 0
    packing: bool = True
    sequence_parallel: int = 1
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
    vllm_mode: str = "colocate"
    vllm_servers: int = 0
    gradient_as_bucket_view: bool = True
    expandable_segments: bool = True

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def generates(self) -> bool:
        """True for GRPO and PPO, False for a reward model."""
        return self.trainer != "reward"

    @property
    def uses_lora(self) -> bool:
        """True if adapters are trained, on 4 bits or not."""
        return self.method != "full"

    @property
    def shares_with_vllm(self) -> bool:
        """True if vLLM lies on the training GPUs."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def vllm_gpus(self) -> int:
        """GPUs of the machine that servers take, each `vllm_tensor_parallel_size`."""
        return self.vllm_servers * self.vllm_tensor_parallel_size

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
    def row_tokens(self) -> int:
        """Tokens of the largest forward, on all GPUs that share it."""
        if not (self.packing and self.max_tokens_per_forward):
            return self.micro_batch_tokens
        # A sequence longer than the bound gets a forward of its own.
        return min(self.micro_batch_tokens, max(self.max_tokens_per_forward, self.sequence_tokens))

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest forward, on one GPU."""
        return -(-self.row_tokens // self.sequence_parallel)

    @property
    def held_tokens(self) -> int:
        """Tokens whose graph waits for one backward on one GPU: of the micro-batch, or of a reward trainer's
        forward."""
        return -(-self._row_tokens_held // self.sequence_parallel)

    @property
    def _row_tokens_held(self) -> int:
        return self.micro_batch_tokens if self.generates else self.row_tokens

    @property
    def scored_tokens(self) -> int:
        """Completion tokens of a micro-batch on one GPU, whose log-probabilities are computed: where GPUs share a row,
        of the part that ends with a completion."""
        sequences, rest = divmod(-(-self.micro_batch_tokens // self.sequence_parallel), self.sequence_tokens)
        return sequences * self.max_completion_length + min(rest, self.max_completion_length)

    def training_gpus(self, num_gpus: int) -> int:
        """GPUs of `num_gpus` that vLLM servers leave for training."""
        return num_gpus - self.vllm_gpus

    def accumulation(self, num_gpus: int) -> int:
        """Micro-batches of an optimizer step on one GPU, of those that train."""
        return self.global_batch // (self.per_device_train_batch_size * num_gpus)

    def num_backwards(self, num_gpus: int) -> int:
        """Backward passes of an optimizer step on one GPU: each adds its gradients to those of the ones before. GPUs
        that share rows go through those of all of them."""
        micro_batches = self.accumulation(num_gpus) * self.sequence_parallel
        return micro_batches * -(-self.micro_batch_tokens // self._row_tokens_held)

    def generated_at_once(self, num_gpus: int) -> int:
        """Completions that one GPU generates at once."""
        steps = self.steps_per_generation or self.accumulation(num_gpus)
        return math.ceil(self.per_device_train_batch_size * steps * self.oversample)

    def generated_groups(self, num_gpus: int) -> float:
        """Groups of completions that are generated at once for updates, spares aside, by the GPUs that train."""
        steps = self.steps_per_generation or self.accumulation(num_gpus)
        return self.per_device_train_batch_size * steps * num_gpus / self.num_generations

    def samples_whole_groups(self, num_gpus: int) -> bool:
        """True if `oversample` gives whole groups whose completions the GPUs can generate in equal shares."""
        groups = self.generated_groups(num_gpus)
        sampled = round(groups * self.oversample)
        is_whole = abs(sampled - groups * self.oversample) <= 1e-3 * groups  # 1.333 is meant to be 4/3
        return self.oversample == 1 or (is_whole and sampled * self.num_generations % num_gpus == 0)


def check_values(job: Job) -> None:
    """Check the settings that cannot work whatever the model and the cards are.

    Raises:
        ConfigError: The setting, and what to do.
    """
    for name, choices in CHOICES.items():
        if getattr(job, name) not in choices:
            raise ConfigError(f"{name} is {getattr(job, name)!r}. Use one of {', '.join(map(str, choices))}.")
    positive = ["global_batch", "per_device_train_batch_size", "lora_r", "reduce_bucket_size", "sub_group_size"]
    positive += ["sequence_parallel", "num_reward_models"]
    positive += ["max_prompt_length", "max_completion_length", "num_generations"] if job.generates else ["max_length"]
    for name in positive:
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}. It must be at least 1.")
    for sentence in _contradictions(job):
        raise ConfigError(sentence)


def _contradictions(job: Job) -> Iterator[str]:
    """Sentences about settings that contradict each other."""
    stage = job.zero_stage
    if job.trainer == "ppo" and job.critic != "adapter" and job.reward_model == "adapter":
        yield (
            f"reward_model=adapter needs a critic's adapter, and critic={job.critic} has none. Set "
            "reward_model=copy, or critic=adapter."
        )
    if job.trainer == "ppo" and "adapter" in (job.critic, job.reward_model) and not job.uses_lora:
        yield (
            f"critic={job.critic}, reward_model={job.reward_model} and method=full: adapters need LoRA. Allow lora, "
            "or set critic=separate and reward_model=copy."
        )
    if job.num_reward_models > 1 and job.reward_model == "none":
        yield f"num_reward_models is {job.num_reward_models}, and reward_model is none. Set reward_model=copy."
    if job.method == "qlora" and stage == 3:
        yield "A 4-bit base under ZeRO-3 cannot be split by DeepSpeed. Use zero_stage 0, 1 or 2, or method=lora."
    if job.offload == "all" and stage != 3:
        yield (
            f"offload=all puts weights into host memory, which is ZeRO-3's; zero_stage is {stage}. Use "
            "offload=optimizer or zero_stage=3."
        )
    if job.offload == "optimizer" and stage == 0:
        yield "offload=optimizer is DeepSpeed's, and zero_stage is 0. Use zero_stage=2 or 3."
    if job.offload != "none" and job.optim != "adamw_torch_fused":
        yield f"optim={job.optim} does not run in host memory. Use offload=none, or leave optim alone."
    if job.checkpoint_every < 0:
        yield f"checkpoint_every is {job.checkpoint_every}. Use 0 for no checkpointing, or 1 and more."
    if job.sequence_parallel > 1 and not job.packing:
        yield (
            f"sequence_parallel={job.sequence_parallel} shares flat rows, and packing is off. Set packing, or leave "
            "sequence_parallel out."
        )
    if job.activation_offloading and job.generates:
        yield f"activation_offloading is the reward trainer's, and trainer is {job.trainer}. Remove it."
    if job.oversample != 1 and (job.trainer != "grpo" or not 1 < job.oversample < math.inf):
        yield f"oversample is {job.oversample}, and trainer is {job.trainer}. It is GRPO's, and at least 1."
    if job.use_vllm and not job.generates:
        yield "use_vllm with a reward model: it generates nothing. Remove use_vllm."
    if job.vllm_mode == "server" and not job.use_vllm:
        yield "vllm_mode is server, and use_vllm is off. Set use_vllm, or remove vllm_mode."
    if job.vllm_servers < 0 or (job.vllm_servers and job.vllm_mode != "server"):
        yield f"vllm_servers is {job.vllm_servers}, and vllm_mode is {job.vllm_mode}. Servers need vllm_mode=server."
    if job.use_vllm and not 0 < job.vllm_gpu_memory_utilization < 1:
        yield f"vllm_gpu_memory_utilization is {job.vllm_gpu_memory_utilization}. It is a share between 0 and 1."


def check_model(job: Job, shape: ModelShape) -> None:
    """Check that the settings go with the model.

    Raises:
        ConfigError: Lengths beyond its positions, LoRA on projections that it lacks, or heads that cannot be shared.
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
    if shape.num_heads % job.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel={job.sequence_parallel} does not divide the {shape.num_heads} attention heads of "
            f"{shape.name}. Use a divisor of {shape.num_heads}."
        )
    if job.uses_lora:
        lora_linears(shape, job.lora_target_modules)


def servers_of(job: Job) -> str:
    """The vLLM servers and their GPUs, in words: "2 vLLM servers on 4 GPUs"."""
    servers = "1 vLLM server" if job.vllm_servers == 1 else f"{job.vllm_servers} vLLM servers"
    return f"{servers} on {job.vllm_gpus} GPU{'s' if job.vllm_gpus > 1 else ''}"


def check_batch(job: Job, num_gpus: int) -> None:
    """Check that the global batch divides into micro-batches and groups, on the GPUs that train of `num_gpus`.

    Raises:
        ConfigError: It does not, or there is no GPU.
    """
    if num_gpus < 1:
        raise ConfigError("There is no GPU in the plan. Give --gpus, such as 4xA40-48GB.")
    if job.training_gpus(num_gpus) < 1:
        raise ConfigError(
            f"{servers_of(job)}, and there are {num_gpus}: none is left for training. Start fewer servers, or take "
            "more GPUs."
        )
    num_gpus = job.training_gpus(num_gpus)
    if num_gpus % job.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel={job.sequence_parallel} does not divide {num_gpus} training GPUs into groups that "
            f"share rows. Use a divisor of {num_gpus}."
        )
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
    if not job.samples_whole_groups(num_gpus):
        groups = job.generated_groups(num_gpus)
        unit = num_gpus // math.gcd(num_gpus, job.num_generations)
        above = unit * (math.floor(groups * job.oversample / unit) + 1)
        raise ConfigError(
            f"oversample {job.oversample} of {groups:g} groups is {groups * job.oversample:.4g}, which {num_gpus} "
            f"GPUs cannot sample in equal shares. Use {above / groups:.4g}."
        )


def check_has(trainer: str, names: Iterable[str]) -> None:
    """Check that a trainer has the settings of these names: what it lacks would do nothing.

    Raises:
        ConfigError: One of them belongs to other trainers.
    """
    for name in names:
        owners = _OWNERS.get(name, (trainer,))
        if trainer in _NAMES and trainer not in owners:
            theirs = " and ".join(_NAMES[owner] for owner in owners)
            raise ConfigError(f"{name} is a setting of {theirs}, and trainer is {trainer}. Leave it out.")


_NAMES = {"reward": "the reward trainer", "grpo": "GRPO", "ppo": "PPO"}
_OWNERS = {
    "max_length": ("reward",),
    "activation_offloading": ("reward",),
    "critic": ("ppo",),
    "num_reward_models": ("ppo",),
    "steps_per_generation": ("grpo",),
    "oversample": ("grpo",),
} | dict.fromkeys(
    (
        *("reward_model", "beta", "num_generations", "max_prompt_length", "max_completion_length"),
        *("use_vllm", "vllm_mode", "vllm_servers", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization"),
        *("vllm_enable_sleep_mode", "ds3_gather_for_generation"),
    ),
    ("grpo", "ppo"),
)


def check_read(job: Job, names: Collection[str], may_use_lora: bool = False) -> None:
    """Check that the job reads the settings of these names, of those for vLLM and LoRA.

    Args:
        job: The job with the settings.
        names: Settings that the user gave.
        may_use_lora: True where the planner may turn to adapters.

    Raises:
        ConfigError: What would read one of them is off.
    """
    for is_read, theirs, remedy in (
        (job.use_vllm, ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"), "Set use_vllm"),
        (job.shares_with_vllm, ("vllm_enable_sleep_mode",), "Set use_vllm with vllm_mode=colocate"),
        (
            job.uses_lora or may_use_lora,
            ("lora_r", "lora_target_modules", "lora_dropout"),
            "Set method=lora or allow lora",
        ),
    ):
        for name in theirs:
            if name in names and not is_read:
                raise ConfigError(f"{name} is given, and nothing reads it. {remedy}, or leave {name} out.")


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job with other settings; values may be strings from a command line.

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
