"""Models that a run holds: trained models, by one optimizer or two, and frozen copies.

PPO, and GRPO with a KL penalty, need a reference; under LoRA it is the policy with its adapters off and costs nothing.
Below ZeRO-3 each GPU holds a whole frozen copy (TRL gives it DeepSpeed's stage 0).
"""

from dataclasses import dataclass, replace

from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape, lm_params, lora_params, quantised_weights, scorer_params


@dataclass(frozen=True, slots=True)
class Engine:
    """Weights that one optimizer trains, and the frozen weights below them.

    Args:
        shape: The model's.
        job: The run's, for this engine: a separate critic trains all its weights, with or without LoRA on the policy.
        num_gpus: GPUs that train the engine.
        role: "policy" or "critic".
        trained: Parameters trained.
        frozen: Parameters frozen in the same module.
        quantised: Frozen parameters in 4 bits.
    """

    shape: ModelShape
    job: Job
    num_gpus: int
    role: str
    trained: int
    frozen: int = 0
    quantised: int = 0

    @property
    def has_head(self) -> bool:
        """True if its backward begins in a language model's head, False for a head with one output."""
        return self.job.generates and self.role == "policy"


@dataclass(frozen=True, slots=True)
class FrozenCopy:
    """A model, or an adapter, that scores and is never trained; its role is "reference" or "reward model"."""

    role: str
    num_params: int
    value_bytes: int

    def bytes_per_gpu(self, job: Job, num_gpus: int) -> float:
        """Bytes on one GPU: ZeRO-3 shards the copy, lower stages do not; FSDP2 shards only GRPO's reference."""
        is_split = job.zero_stage == 3 and (not job.fsdp or (job.trainer, self.role) == ("grpo", "reference"))
        return self.num_params * self.value_bytes / (num_gpus if is_split else 1)


def engines(shape: ModelShape, job: Job, num_gpus: int) -> list[Engine]:
    """Return the engines in the order of their backwards: the policy, and PPO's separate critic."""
    adapter = lora_params(shape, job.lora_r, job.lora_target_modules) if job.uses_lora else 0
    whole, head = lm_params(shape), shape.hidden + 1
    if job.trainer == "reward":
        return [_engine(shape, job, num_gpus, "policy", scorer_params(shape), adapter + shape.hidden)]
    if job.trainer == "grpo" or job.critic == "none":
        return [_engine(shape, job, num_gpus, "policy", whole, adapter)]
    if job.critic == "adapter":
        return [_engine(shape, job, num_gpus, "policy", whole, 2 * adapter + head)]
    if job.critic == "head":
        return [_engine(shape, job, num_gpus, "policy", whole + (0 if job.uses_lora else head), adapter + head)]
    # PPOTrainer passes `peft_config` to the policy only. The critic's score has no bias.
    critic = _engine(shape, replace(job, method="full"), num_gpus, "critic", scorer_params(shape), 0)
    return [_engine(shape, job, num_gpus, "policy", whole, adapter), critic]


def _engine(shape: ModelShape, job: Job, num_gpus: int, role: str, num_params: int, num_adapter_params: int) -> Engine:
    """Build the engine of a model that is trained whole or by its adapters.

    Args:
        shape, job: The model of the job, and its settings.
        num_gpus: GPUs among which the engine divides its states.
        role: "policy" or "critic".
        num_params: Weights of the whole model.
        num_adapter_params: Weights of its adapters, counted with LoRA only.
    """
    if not job.uses_lora:
        return Engine(shape, job, num_gpus, role, num_params)
    quantised = quantised_weights(shape) if job.method == "qlora" else 0
    return Engine(shape, job, num_gpus, role, num_adapter_params, num_params, quantised)


def frozen_copies(shape: ModelShape, job: Job) -> list[FrozenCopy]:
    """Return models and adapters that only score."""
    copies = []
    if not job.uses_lora and (job.trainer == "ppo" or (job.trainer == "grpo" and job.beta != 0)):
        copies.append(FrozenCopy("reference", lm_params(shape), 4 if job.dtype == "float32" else 2))
    if job.generates and job.reward_model == "copy":
        # from_pretrained loads it, in the dtype of its config.
        copies.append(FrozenCopy("reward model", job.num_reward_models * scorer_params(shape), 2))
    if job.generates and job.reward_model == "adapter":
        adapter = lora_params(shape, job.lora_r, job.lora_target_modules)
        copies.append(FrozenCopy("reward model", job.num_reward_models * adapter, 2 if job.zero_stage else 4))
    return copies


def num_scoring_passes(job: Job, num_gpus: int) -> int:
    """Count forwards without gradients over a completion: reference, reward model, values, old log-probabilities.

    GRPO takes old log-probabilities from the update's forward, unless one generation serves several optimizer steps.
    """
    if not job.generates:
        return 0
    is_ppo = job.trainer == "ppo"
    has_values = is_ppo and job.critic in ("adapter", "separate")  # a value head's come with the log-probabilities
    num_reward_models = job.num_reward_models if job.reward_model != "none" else 0
    is_old = is_ppo or bool(job.steps_per_generation and job.accumulation(num_gpus) % job.steps_per_generation)
    return (is_ppo or job.beta != 0) + num_reward_models + is_old + has_values
