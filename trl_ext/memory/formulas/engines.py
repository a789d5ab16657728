"""Which models a run holds: what is trained, in how many engines, and which frozen copies stand beside it.

A reference is needed by PPO and by GRPO with a KL penalty; under LoRA it is the policy with its adapters off and costs
nothing. Below ZeRO-3 a frozen copy is whole on every GPU (TRL gives it DeepSpeed's stage 0).
"""

from dataclasses import dataclass, replace

from trl_ext.memory.formulas.states import Engine, base_engine
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape, lm_params, lora_params, scorer_params


@dataclass(frozen=True, slots=True)
class FrozenCopy:
    """A model, or an adapter, that scores and is never trained.

    Args:
        role: "reference" or "reward model".
        num_params: Its parameters.
        value_bytes: Of one of them.
    """

    role: str
    num_params: int
    value_bytes: int

    def bytes_per_gpu(self, job: Job, num_gpus: int) -> float:
        return self.num_params * self.value_bytes / (num_gpus if job.zero_stage == 3 else 1)


@dataclass(frozen=True, slots=True)
class Part:
    """An engine with what its forward and backward look like.

    Args:
        engine: Its weights.
        job: The run as this engine is trained: a separate critic has all its weights trained, LoRA beside it or not.
        has_head: Its backward begins in a language model's head.
    """

    engine: Engine
    job: Job
    has_head: bool


def parts(shape: ModelShape, job: Job) -> list[Part]:
    """What goes backward, one after the other."""
    jobs = {"policy": job, "critic": critic_job(job)}
    return [
        Part(engine, jobs[engine.role], job.generates and engine.role == "policy") for engine in engines(shape, job)
    ]


def critic_job(job: Job) -> Job:
    """The run as a separate critic sees it: PPOTrainer gives `peft_config` to the policy alone, and DDP leaves the
    critic in the dtype that it was loaded in."""
    return replace(job, method="full") if job.uses_lora and job.critic == "separate" else job


def engines(shape: ModelShape, job: Job) -> list[Engine]:
    """What is trained: one engine, two with PPO's separate critic."""
    adapter = lora_params(shape, job.lora_r, job.lora_target_modules) if job.uses_lora else 0
    if job.trainer == "reward":
        return [base_engine("policy", shape, scorer_params(shape), adapter + shape.hidden, job)]
    if job.trainer == "grpo":
        return [base_engine("policy", shape, lm_params(shape), adapter, job)]
    return _ppo_engines(shape, job, adapter)


def _ppo_engines(shape: ModelShape, job: Job, adapter: int) -> list[Engine]:
    whole, head = lm_params(shape), shape.hidden + 1
    if job.critic == "adapter":
        return [base_engine("policy", shape, whole, 2 * adapter + head, job)]
    if job.critic == "head":
        return [base_engine("policy", shape, whole + (0 if job.uses_lora else head), adapter + head, job)]
    # Its score has no bias.
    critic = base_engine("critic", shape, scorer_params(shape), 0, critic_job(job))
    return [base_engine("policy", shape, whole, adapter, job), critic]


def frozen_copies(shape: ModelShape, job: Job) -> list[FrozenCopy]:
    """What stands beside the trained models."""
    copies = []
    if has_reference_copy(job):
        copies.append(FrozenCopy("reference", lm_params(shape), 4 if job.dtype == "float32" else 2))
    if job.generates and job.reward_model == "copy":
        # Loaded by plain from_pretrained, in the dtype of its config.
        copies.append(FrozenCopy("reward model", scorer_params(shape), 2))
    if job.generates and job.reward_model == "adapter":
        adapter = lora_params(shape, job.lora_r, job.lora_target_modules)
        copies.append(FrozenCopy("reward model", adapter, 2 if job.zero_stage else 4))
    return copies


def has_reference_copy(job: Job) -> bool:
    """Whether a second copy of the policy stands for the reference."""
    return not job.uses_lora and (job.trainer == "ppo" or (job.trainer == "grpo" and job.beta != 0))


def num_scoring_passes(job: Job) -> int:
    """Forwards without gradients over each completion: reference, reward model, values, old log-probabilities."""
    if not job.generates:
        return 0
    has_reference = job.trainer == "ppo" or job.beta != 0
    return has_reference + (job.reward_model != "none") + (job.trainer == "ppo") + (job.trainer == "ppo")
