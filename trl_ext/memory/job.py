"""Settings on which memory depends, and checks for settings that contradict each other.

Fields that are arguments of a trainer have the trainer's name. `zero_stage`, `offload` and the bucket sizes go into
DeepSpeed's file, `method` and `dtype` into the model's arguments.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import OF_A_JOB, check
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape, lora_linears

MOST_SAMPLES = 1_000_000  # of a global batch: the search tries its divisors one by one
CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": ("reward", "grpo", "ppo"),
    "method": ("full", "lora", "qlora"),
    "critic": ("adapter", "head", "separate", "none"),
    "reward_model": ("none", "copy", "adapter"),
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "all"),
    "dtype": ("bfloat16", "float32"),
    "optim": ("adamw_torch_fused", "adamw_bnb_8bit"),
    "vllm_mode": ("colocate", "server"),
}


def _option(default: Any, purpose: str) -> Any:
    """Return a field that `trl-ext plan` takes as an option of its name, with this purpose in its help."""
    return field(default=default, metadata={"purpose": purpose})


@dataclass(frozen=True, slots=True)
class Job:
    """Settings of one training run; most fields are options of `trl-ext plan`."""

    trainer: str  # "reward", "grpo" or "ppo"
    # All weights, adapters, or adapters on a 4-bit base.
    method: str = _option("full", "full (default), lora or qlora")
    # A second LoRA on the same backbone, a value head on the actor's hidden states, or a model with its optimizer.
    critic: str = _option("separate", "PPO's: adapter, head, separate, or none (REINFORCE++, RLOO, GRPO or ReMax)")
    # A copy is frozen; an adapter is a third LoRA on the policy's backbone.
    reward_model: str = _option("none", "of PPO and GRPO: none, copy (of the policy's size), or adapter (PPO)")
    num_reward_models: int = _option(1, "of PPO: reward models of that kind, an ensemble (default 1)")
    beta: float = _option(0.0, "weight of the KL penalty; GRPO without it has no reference")
    global_batch: int = _option(
        64, "samples of an optimizer step over all GPUs: pairs, or completions (default about 64)"
    )
    per_device_train_batch_size: int = _option(1, "samples of a micro-batch (default: planned)")
    # 0: all micro-batches of an optimizer step, TRL's default.
    steps_per_generation: int = _option(0, "micro-batches generated at once (default: planned)")
    oversample: float = _option(1.0, "GRPO: completions generated for each completion of an update (default 1)")
    max_length: int = _option(1024, "tokens of one side of a pair (default 1024)")
    max_prompt_length: int = _option(512, "tokens of the longest prompt (default 512)")
    max_completion_length: int = _option(256, "tokens of the longest completion (default 256)")
    # 0: unknown.
    mean_completion_length: int = _option(0, "mean tokens of a completion, for a step's seconds (default: longest)")
    max_tokens_per_forward: int = _option(0, "most tokens of a packed forward (default: no limit)")
    # Padded batches also need a mask and repeated keys.
    packing: bool = _option(True, "flat rows without padding (default)")
    layer_kernels: bool = _option(True, "packed rows have Liger's norms, positions and MLPs (default), if installed")
    # GPUs of a group are neighbours; each forwards a part of the row's tokens.
    sequence_parallel: int = _option(1, "GPUs that share each row, for rows that are too long for one GPU (default 1)")
    num_generations: int = _option(8, "completions per prompt (default 8; PPO 1)")
    lora_r: int = _option(16, "rank of the adapters (default 16)")
    lora_target_modules: tuple[str, ...] = _option(ALL_LINEAR, "projections, with commas between (default all-linear)")
    lora_dropout: float = _option(0.0, "dropout of the adapters (default 0)")
    zero_stage: int = _option(0, "0 (DDP), 1, 2 or 3 (default: planned)")  # 0 on one GPU: no launcher
    # With zero_stage 3, by PyTorch instead of DeepSpeed.
    fsdp: bool = _option(False, "shard by FSDP2 as ZeRO-3 does, without DeepSpeed")
    offload: str = _option("none", "to host memory: none, optimizer, or all with weights (default: planned)")
    checkpoint_every: int = _option(1, "checkpoint every n-th layer, 0 none (default: planned)")
    keep_attention: bool = _option(False, "checkpointed layers keep attention's output (default: planned)")
    activation_offloading: bool = _option(
        False, "checkpoints of the reward trainer wait in host memory (default: planned)"
    )
    # Under DDP adapters are always float32.
    dtype: str = _option("bfloat16", "bfloat16 or float32, of the weights as loaded (default: planned)")
    fp16: bool = _option(False, "fp16 instead of bf16, for cards without it: compute capability below 8.0")
    optim: str = _option("adamw_torch_fused", "adamw_torch_fused or adamw_bnb_8bit")  # transformers' names
    reduce_bucket_size: int = _option(50_000_000, "DeepSpeed's, in elements (default 50,000,000)")
    stage3_max_live_parameters: int = _option(100_000_000, "DeepSpeed's, in elements (default 100,000,000)")
    stage3_prefetch_bucket_size: int = _option(50_000_000, "DeepSpeed's, in elements (default 50,000,000)")
    sub_group_size: int = _option(100_000_000, "DeepSpeed's, in elements (default 100,000,000)")
    overlap_comm: bool = _option(False, "ZeRO-1 and 2 send gradients during backward, with a second bucket")
    zero_hpz_partition_size: int = _option(
        1, "of ZeRO-3: GPUs of a machine that hold a second copy of the weights (default 1: none)"
    )
    ds3_gather_for_generation: bool = _option(True, "gather ZeRO-3's weights before generating (default)")
    use_vllm: bool = _option(False, "vLLM, on the training GPUs unless --vllm_mode is server")
    vllm_gpu_memory_utilization: float = _option(0.3, "vLLM's share of a card (default: planned)")
    vllm_tensor_parallel_size: int = _option(
        1, "GPUs over which vLLM, or each server, splits the model (default: planned)"
    )
    vllm_enable_sleep_mode: bool = _option(False, "vLLM frees its memory during training (default: planned)")
    vllm_mode: str = _option("colocate", "colocate (default), or server for vLLM on separate GPUs")
    # 0 also for servers on other machines, whose time is not counted.
    vllm_servers: int = _option(0, "vLLM servers on separate GPUs; the other GPUs train; auto: the planner chooses")
    generation_ahead: int = _option(0, "1: vLLM servers generate the next samples during training (default 0)")
    gradient_as_bucket_view: bool = True  # DDP's gradients live in its buckets, as our trainers set it; TRL: twice
    expandable_segments: bool = True  # PYTORCH_CUDA_ALLOC_CONF asks for them; less fragmentation

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def generates(self) -> bool:
        """True for GRPO and PPO, False for a reward model."""
        return self.trainer != "reward"

    @property
    def uses_lora(self) -> bool:
        """True if adapters are trained."""
        return self.method != "full"

    @property
    def shares_with_vllm(self) -> bool:
        """True if vLLM runs on the training GPUs."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def gathers_to_generate(self) -> bool:
        """True if sharded weights are gathered once for transformers' generate; FSDP2 gathers them for every token."""
        return self.ds3_gather_for_generation and not self.fsdp

    @property
    def vllm_gpus(self) -> int:
        """GPUs of the machine that vLLM servers take."""
        return self.vllm_servers * self.vllm_tensor_parallel_size

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_length + self.max_completion_length if self.generates else self.max_length

    @property
    def mean_tokens(self) -> int:
        """Mean tokens of a sequence, or tokens of the longest if the mean is unknown."""
        if self.generates and self.mean_completion_length:
            return self.max_prompt_length + self.mean_completion_length
        return self.sequence_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch in the worst case: padded, no prompt shared."""
        sequences = self.per_device_train_batch_size * (1 if self.generates else 2)
        return sequences * self.sequence_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of the largest forward, on all GPUs that share it."""
        if not (self.packing and self.max_tokens_per_forward):
            return self.micro_batch_tokens
        # A sequence longer than the limit gets a separate forward.
        return min(self.micro_batch_tokens, max(self.max_tokens_per_forward, self.sequence_tokens))

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest forward, on one GPU."""
        return -(-self.row_tokens // self.sequence_parallel)

    @property
    def kept_tokens(self) -> int:
        """Tokens of a prompt whose keys one GPU keeps for later forwards of its group; 0 if a group fits into one
        forward, and under FSDP."""
        if not (self.generates and self.packing) or self.fsdp:
            return 0
        if self.max_tokens_per_forward:
            fits = self.max_prompt_length + self.num_generations * self.max_completion_length <= self.row_tokens
        else:
            fits = self.num_generations <= self.per_device_train_batch_size
        return 0 if fits else -(-self.max_prompt_length // self.sequence_parallel)

    @property
    def held_tokens(self) -> int:
        """Tokens on one GPU whose graph waits for one backward: the micro-batch, or a reward trainer's forward."""
        return -(-self._row_tokens_held // self.sequence_parallel)

    @property
    def _row_tokens_held(self) -> int:
        return self.micro_batch_tokens if self.generates else self.row_tokens

    @property
    def scored_tokens(self) -> int:
        """Completion tokens of a micro-batch that one GPU scores. If GPUs share a row: of the part with the most."""
        sequences, rest = divmod(-(-self.micro_batch_tokens // self.sequence_parallel), self.sequence_tokens)
        return sequences * self.max_completion_length + min(rest, self.max_completion_length)

    def training_gpus(self, num_gpus: int) -> int:
        """GPUs of `num_gpus` that vLLM servers leave for training."""
        return num_gpus - self.vllm_gpus

    def accumulation(self, num_gpus: int) -> int:
        """Micro-batches of an optimizer step on each of `num_gpus` training GPUs."""
        return self.global_batch // (self.per_device_train_batch_size * num_gpus)

    def num_backwards(self, num_gpus: int) -> int:
        """Backward passes of an optimizer step on one GPU, each added to the gradients so far. GPUs that share rows
        take part in every pass of their group."""
        micro_batches = self.accumulation(num_gpus) * self.sequence_parallel
        return micro_batches * -(-self.micro_batch_tokens // self._row_tokens_held)

    def generated_at_once(self, num_gpus: int) -> int:
        """Completions that one GPU generates at once."""
        steps = self.steps_per_generation or self.accumulation(num_gpus)
        return math.ceil(self.per_device_train_batch_size * steps * self.oversample)

    def generated_groups(self, num_gpus: int) -> float:
        """Groups of completions that the training GPUs generate at once for updates, without oversampling."""
        steps = self.steps_per_generation or self.accumulation(num_gpus)
        return self.per_device_train_batch_size * steps * num_gpus / self.num_generations

    def samples_whole_groups(self, num_gpus: int) -> bool:
        """True if `oversample` gives whole groups, and each GPU the same number of completions."""
        groups = self.generated_groups(num_gpus)
        sampled = round(groups * self.oversample)
        is_whole = abs(sampled - groups * self.oversample) <= 1e-3 * groups  # 1.333 means 4/3
        return self.oversample == 1 or (is_whole and sampled * self.num_generations % num_gpus == 0)


def check_values(job: Job) -> None:
    """Raise ConfigError for settings that cannot work with any model and any cards."""
    for name, choices in CHOICES.items():
        if getattr(job, name) not in choices:
            raise ConfigError(f"{name} is {getattr(job, name)!r}. Use one of {', '.join(map(str, choices))}.")
    positive = ["global_batch", "per_device_train_batch_size", "lora_r", "reduce_bucket_size", "sub_group_size"]
    positive += ["zero_hpz_partition_size", "sequence_parallel", "num_reward_models"]
    positive += ["max_prompt_length", "max_completion_length", "num_generations"] if job.generates else ["max_length"]
    not_negative = ["steps_per_generation", "mean_completion_length", "max_tokens_per_forward"]
    not_negative += ["stage3_max_live_parameters", "stage3_prefetch_bucket_size", "beta", "lora_dropout"]
    for name, least in (dict.fromkeys(positive, 1) | dict.fromkeys(not_negative, 0)).items():
        if not least <= getattr(job, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(job, name)}. It must be a number of at least {least}.")
    if job.global_batch > MOST_SAMPLES:
        raise ConfigError(f"global_batch is {job.global_batch}. It must be at most {MOST_SAMPLES}.")
    check(job, OF_A_JOB)


def check_model(job: Job, shape: ModelShape) -> None:
    """Raise ConfigError if lengths exceed the model's positions, LoRA targets projections that it lacks, or rows are
    packed and its attention is eager."""
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
    if job.packing and shape.is_eager:
        raise ConfigError(
            f"packing=True: {shape.name} loads with eager attention, since packed attention computes neither "
            "soft-capping nor sinks. Set packing=False."
        )
    if job.uses_lora:
        lora_linears(shape, job.lora_target_modules)


def servers_of(job: Job) -> str:
    """Name the vLLM servers and their GPUs: "2 vLLM servers on 4 GPUs"."""
    servers = "1 vLLM server" if job.vllm_servers == 1 else f"{job.vllm_servers} vLLM servers"
    return f"{servers} on {job.vllm_gpus} GPU{'s' if job.vllm_gpus > 1 else ''}"


def check_batch(job: Job, num_gpus: int) -> None:
    """Raise ConfigError unless the global batch divides into micro-batches and groups on the training GPUs."""
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
    """Raise ConfigError for a setting that only other trainers have: it would do nothing."""
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
        *("vllm_enable_sleep_mode", "ds3_gather_for_generation", "generation_ahead", "mean_completion_length"),
    ),
    ("grpo", "ppo"),
)


def check_read(job: Job, names: Collection[str], may_use_lora: bool = False) -> None:
    """Raise ConfigError for a setting in `names` of vLLM or LoRA that has no effect, because vLLM or LoRA is off. With
    `may_use_lora` the planner may choose adapters."""
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
    """Return the job with other settings; values may be strings from a command line. Raises ConfigError for an unknown
    setting, a value of another type, or settings that cannot work together."""
    types = {one.name: type(getattr(job, one.name)) for one in fields(job)}
    for name in settings:
        if name not in types:
            near = get_close_matches(name, types, n=1, cutoff=0.4)
            raise ConfigError(f"'{name}' is no setting of a plan. Nearest: {near[0] if near else 'zero_stage'}.")
    typed: dict[str, Any] = {}
    for name, value in settings.items():
        kind = types[name]
        if isinstance(value, str) and kind in (tuple, bool):
            if kind is bool and value.lower() not in ("true", "false"):
                raise ConfigError(f"{name} is '{value}'. Write true or false.")
            value = value.split(",") if kind is tuple else value.lower() == "true"
        try:
            typed[name] = kind(value)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise ConfigError(f"{name} is '{value}', which is no {what}.") from None
    return replace(job, **typed)
