"""The planner's search: a job on a machine, its fixed settings, and the user's opt-ins."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas.estimate import Estimate, quick_estimate
from trl_ext.memory.formulas.generation import check_group, check_vllm
from trl_ext.memory.job import Job, changed, check_batch, check_has, check_model, servers_of
from trl_ext.memory.models.shapes import ModelShape, lm_params
from trl_ext.memory.options import options_of
from trl_ext.memory.units import GIB

ALLOW = ("lora", "qlora", "adam8bit")
SERVER_SIZES = (1, 2, 4, 8)  # GPUs of a vLLM server, and numbers of servers
OF_SERVERS = {"vllm_servers", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization"}
FULL_ENOUGH = 0.9  # largest share of a card for vLLM, and a server's default


@dataclass(frozen=True, slots=True)
class Search:
    """A job on a machine, and the settings that the planner may choose: all except `given`."""

    job: Job
    given: frozenset[str]
    shape: ModelShape
    hardware: Hardware

    @property
    def num_gpus(self) -> int:
        """GPUs that train."""
        return self.job.training_gpus(self.hardware.num_gpus)

    def estimate(self, job: Job) -> Estimate:
        """Estimate a job whose settings are known to go together."""
        return quick_estimate(job, self.shape, self.hardware)

    def may(self, name: str) -> bool:
        """Return True if the planner may choose this setting, False if it is given."""
        return name not in self.given

    def choices(self, name: str, free: tuple) -> tuple:
        """Return the values to try: all of `free`, or only the given value."""
        return free if self.may(name) else (getattr(self.job, name),)

    def placed(self) -> list["Search"]:
        """Return the search without servers, and with each possible number and size of vLLM servers. Raises
        ConfigError if none is possible, with the reason for the first one tried."""
        is_elsewhere = self.job.vllm_servers == 0 and not self.may("vllm_servers")
        if self.job.vllm_mode != "server" or is_elsewhere:
            return [self]
        if self.hardware.num_gpus < 2:
            raise ConfigError(f"A vLLM server next to training needs two GPUs. {self.hardware} has one.")
        job = self.job
        if self.may("vllm_gpu_memory_utilization"):
            job = replace(job, vllm_gpu_memory_utilization=FULL_ENOUGH)
        found, reasons = [], []
        sizes = self.choices("vllm_tensor_parallel_size", SERVER_SIZES)
        for num, size in product(self.choices("vllm_servers", SERVER_SIZES), sizes):
            one = replace(job, vllm_servers=num, vllm_tensor_parallel_size=size)
            try:
                check_batch(one, self.hardware.num_gpus)
                check_vllm(self.shape, one, self.hardware)
            except ConfigError as error:
                reasons.append(error)
            else:
                found.append(replace(self, job=one, given=self.given | OF_SERVERS))
        if not found:
            raise reasons[0]
        return found

    def check(self) -> None:
        """Raise ConfigError if given settings do not go with the model or the GPUs, or vLLM cannot start with them."""
        check_model(self.job, self.shape)
        for one in self.placed():
            check_batch(one.job, one.hardware.num_gpus)
        if self.job.shares_with_vllm and not self.may("vllm_tensor_parallel_size"):
            check_group(self.shape, self.job, self.hardware)
        if self.job.shares_with_vllm and not self.may("vllm_gpu_memory_utilization"):
            # Over the given group, else over the largest.
            here, heads = self.hardware.gpus_per_machine, self.shape.num_heads
            possible = tuple(size for size in SERVER_SIZES if here % size == 0 and heads % size == 0)
            sizes = self.choices("vllm_tensor_parallel_size", possible)
            check_vllm(self.shape, replace(self.job, vllm_tensor_parallel_size=max(sizes)), self.hardware)


def make_search(trainer: str, shape: ModelShape, hardware: Hardware, settings: Mapping[str, Any]) -> Search:
    """Make a search from a user's settings and the defaults.

    Raises ConfigError for an unknown setting, or settings that cannot work.

    Args:
        trainer: "grpo", "ppo" or "reward".
        shape: The model's sizes.
        hardware: The GPUs and machines.
        settings: Values by the name of a setting; settings that are left out are searched, or have defaults.
    """
    settings = dict(settings)
    check_has(trainer, settings)
    if settings.get("vllm_servers") == "auto":  # the planner chooses, as with vllm_mode=server without a number
        if settings.setdefault("vllm_mode", "server") != "server":
            raise ConfigError("vllm_servers is auto, and vllm_mode is colocate. Servers need vllm_mode=server.")
        del settings["vllm_servers"]
    # A server implies vLLM.
    if settings.get("vllm_servers"):
        settings.setdefault("vllm_mode", "server")
    if settings.get("vllm_mode") == "server":
        settings.setdefault("use_vllm", True)
    if trainer == "grpo" and settings.get("reward_model") == "adapter":
        raise ConfigError("reward_model=adapter is PPO's. GRPO takes reward_model=copy, a whole model, or none.")
    # Each given server takes as few GPUs as hold the weights.
    share = float(settings.get("vllm_gpu_memory_utilization", FULL_ENOUGH)) * hardware.card.total_gib * GIB
    least = next((size for size in SERVER_SIZES if 2 * lm_params(shape) / size < share), SERVER_SIZES[-1])
    of_servers = int(settings.get("vllm_servers", 0)) * int(settings.get("vllm_tensor_parallel_size", least))
    settings["global_batch"] = _global_batch(settings, max(hardware.num_gpus - of_servers, 1))
    settings.pop("gradient_accumulation_steps", None)
    given = frozenset(settings)
    if "adapter" in (settings.get("critic"), settings.get("reward_model")):
        settings.setdefault("method", "lora")  # an adapter critic or reward model implies LoRA
    # Start from a stage that goes with the offload; the search finds the best.
    stage = {"optimizer": {"zero_stage": 2}, "all": {"zero_stage": 3}}.get(settings.get("offload", "none"), {})
    stage |= {"zero_stage": 2} if settings.get("overlap_comm") else {}
    stage |= {"zero_stage": 3} if settings.get("fsdp") or settings.get("zero_hpz_partition_size") else {}
    defaults = ppo_defaults(trainer, settings.get("method", "full"), given, settings.get("critic"))
    defaults["packing"] = not shape.is_eager
    search = Search(changed(Job(trainer), {**defaults, **stage, **settings}), given, shape, hardware)
    search.check()
    here = hardware.gpus_per_machine
    if search.job.overlap_comm and search.num_gpus == 1:
        raise ConfigError("overlap_comm sends gradients to other GPUs, and one trains. Leave it out.")
    if here % (part := search.job.zero_hpz_partition_size):
        raise ConfigError(
            f"zero_hpz_partition_size {part} does not divide a machine's {here} GPUs. Use a divisor, or leave it out."
        )
    return search


def _global_batch(settings: Mapping[str, Any], num_gpus: int) -> int:
    """Return the global batch: given, or from micro-batch and accumulation, or about 64, divisible by the GPUs."""
    if "global_batch" in settings:
        return int(settings["global_batch"])
    row = int(settings.get("per_device_train_batch_size") or 1) * num_gpus
    if (steps := settings.get("gradient_accumulation_steps")) is not None:
        return row * int(steps)
    group = max(int(settings.get("num_generations", 8)), 1)  # a job refuses fewer
    step = row * group if row % group else row
    return max(1, round(64 / step)) * step


def ppo_defaults(trainer: str, method: str, given: frozenset[str], critic: str | None = None) -> dict[str, Any]:
    """Return PPO's critic and reward model: adapters if the policy has adapters, else separate models.

    Args:
        trainer: "ppo", or another, which has neither.
        given: Fields that the user decided.
        critic: The user's, or None. A reward adapter needs an adapter critic.
    """
    if trainer != "ppo":
        return {}
    is_full = method == "full"
    defaults = {
        "critic": "separate" if is_full else "adapter",
        "reward_model": "adapter" if not is_full and critic in (None, "adapter") else "copy",
        "num_generations": 1,
        "beta": 0.05,
    }
    return {name: value for name, value in defaults.items() if name not in given}


def opt_ins_of(allow: Iterable[str]) -> frozenset[str]:
    """Return the opt-ins named in `allow`; raise ConfigError with the nearest name for an unknown name."""
    opt_ins = frozenset(name.strip() for name in allow if name.strip())
    for name in sorted(opt_ins - set(ALLOW)):
        near = get_close_matches(name, ALLOW, n=1, cutoff=0.0)[0]
        raise ConfigError(f"'{name}' cannot be allowed. Use any of {', '.join(ALLOW)}; the nearest is {near}.")
    return opt_ins


# Names of techniques and of plans -----------------------------------------------------------------------------------


def technique(job: Job, num_gpus: int = 2) -> str:
    """Name ZeRO stage, offload and method: "ZeRO-2, all weights"."""
    plain = "DDP" if num_gpus > 1 else "one GPU"
    stage = "FSDP2" if job.fsdp else f"ZeRO-{job.zero_stage}" if job.zero_stage else plain
    offload = {"none": "", "optimizer": " + optimizer in host memory", "all": " + all states in host memory"}
    method = {"full": "all weights", "lora": f"LoRA r={job.lora_r}", "qlora": f"QLoRA r={job.lora_r}"}[job.method]
    if job.uses_lora and job.trainer == "ppo":
        method += ", no critic" if job.critic == "none" else f", {job.critic} critic"
    elif not job.uses_lora and job.optim == "adamw_bnb_8bit":
        method += ", 8-bit Adam"
    return f"{stage}{offload[job.offload]}, {method}"


def label(job: Job, num_gpus: int) -> str:
    """Name a plan, over the GPUs that train: "ZeRO-2, LoRA r=16, micro-batch 4 x 2, checkpointing"."""
    every = {0: "no checkpointing", 1: "checkpointing", 2: "every 2nd layer checkpointed"}.get(
        job.checkpoint_every, f"every {job.checkpoint_every}th layer checkpointed"
    )
    every += "".join(option.label for option in options_of(job))
    every += f", rows shared by {job.sequence_parallel} GPUs" if job.sequence_parallel > 1 else ""
    batch = f"micro-batch {job.per_device_train_batch_size} x {job.accumulation(num_gpus)}"
    name = technique(job, num_gpus)
    return f"{name}, {batch}, {every}"


def vllm_label(job: Job) -> str:
    """Name vLLM's place, "vLLM over 2 GPUs"; "" without vLLM, or if each GPU has an engine."""
    group = job.vllm_tensor_parallel_size
    if job.vllm_servers:
        return servers_of(job)
    return f"vLLM over {group} GPUs" if job.shares_with_vllm and group > 1 else ""
