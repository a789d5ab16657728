"""Settle one run's settings: what `memory` names, held against what the user set and how the run was launched.

Contract: what the user gave stays, and the launch is a fact. Without a word in `allow` only settings in `run.FREE`
change, and the global batch never does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.estimate import Estimate, estimate
from trl_ext.memory.formulas.generation import check_vllm
from trl_ext.memory.job import Job, changed, check_batch, check_model
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.ladder import Search, micro_batches
from trl_ext.memory.planner.planner import Plan, Plans, plans_of
from trl_ext.memory.planner.words import technique
from trl_ext.memory.run.fields import FREE
from trl_ext.memory.run.source import Source

MICRO = "per_device_train_batch_size"
LAUNCHED = frozenset({"zero_stage", "offload"})
# The shipped launch file of a stage and an offload.
FILES = {(0, "none"): "multi_gpu", (1, "none"): "zero1", (2, "none"): "zero2", (3, "none"): "zero3"}
FILES |= {(2, "optimizer"): "zero2_offload", (3, "all"): "zero3_offload"}
MUCH_FASTER = 1.25  # another launch is mentioned if a step takes so many times less
SIZES = frozenset(
    {"reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "sub_group_size"}
)
_TRAINS = {"full": "all weights", "lora": "adapters", "qlora": "adapters on a 4-bit base"}


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run before its model loads.

    Args:
        trainer: "reward", "grpo" or "ppo".
        shape: Its model.
        fields: Every field of `Job` that the run has, given or by default.
        given: Those that the user, or the launch, decided.
        num_processes: As launched, one for each GPU.
        local_processes: Of them on this machine.
    """

    trainer: str
    shape: ModelShape
    fields: Mapping[str, Any]
    given: frozenset[str]
    num_processes: int
    local_processes: int


def settle(run: Run, source: Source, allow: frozenset[str], machine: Callable[[], Hardware]) -> Plan:
    """Settings for the run.

    Args:
        run: What is known.
        source: What `memory` names.
        allow: Words that the user gave.
        machine: Looks at the cards of this machine.

    Raises:
        ConfigError: Nothing fits as launched, with the launch that would; the launch or a given setting contradicts
            the plan; or the plan needs a word of the user.
    """
    hardware = _hardware(run, source, machine)
    if source.job is not None:
        return _frozen(run, source, source.job, allow, hardware)
    plans = plans_of(search_of(run, hardware), allow)
    if not plans.plans:
        raise ConfigError(_nothing_fits(run, plans, hardware, allow))
    return plans.best


def faster_launch(run: Run, plan: Plan, allow: frozenset[str]) -> str:
    """A sentence if another launch makes steps much faster; "" if none does."""
    other = _elsewhere(run, plan.estimate.case.hardware, allow).best
    if other.estimate.step_s * MUCH_FASTER > plan.estimate.step_s:
        return ""
    return (
        f"Launched with {_launch(other.job)}, an optimizer step takes about {other.estimate.step_s:.0f} s instead of "
        f"{plan.estimate.step_s:.0f} (estimated)."
    )


def search_of(run: Run, hardware: Hardware, free: frozenset[str] = frozenset()) -> Search:
    """The planner's question: the run as it is, and what may be turned.

    Args:
        free: Names to leave open beside FREE.

    Raises:
        ConfigError: The run's own settings cannot work.
    """
    # Method, optimizer and PPO's critic change by a word of the user's only, which the planner sees to.
    turned = ((FREE | SIZES | {"method", "optim", "critic"}) - run.given) | free
    fields = dict(run.fields)
    for name in turned & SIZES:
        fields.pop(name, None)  # the planner's own, not DeepSpeed's defaults
    if "per_device_train_batch_size" in turned:
        fields["per_device_train_batch_size"] = 1
    job = changed(Job(run.trainer), fields)
    check_model(job, run.shape)
    check_batch(job, hardware.num_gpus)
    if "vllm_gpu_memory_utilization" not in turned:
        check_vllm(run.shape, hardware.card, job, hardware.num_gpus)
    return Search(job, frozenset(fields) - turned, run.shape, hardware)


# The machine ------------------------------------------------------------------------------------------------------


def _hardware(run: Run, source: Source, machine: Callable[[], Hardware]) -> Hardware:
    if source.hardware is None:
        found = machine()
        if run.local_processes > found.num_gpus:
            raise ConfigError(
                f"{run.local_processes} processes were launched here, and there are {found.num_gpus} cards. Launch "
                "one process for each card."
            )
        return replace(found, num_gpus=run.num_processes)
    if source.hardware.num_gpus != run.num_processes:
        raise ConfigError(
            f"memory={source.name} is for {source.hardware}, and {_counted(run.num_processes)} launched. Launch with "
            f"--num_processes {source.hardware.num_gpus}, or say memory={run.num_processes}x"
            f"{source.hardware.card.name}."
        )
    return source.hardware


def _counted(num_processes: int) -> str:
    return "1 process was" if num_processes == 1 else f"{num_processes} processes were"


# Searched ---------------------------------------------------------------------------------------------------------


def _elsewhere(run: Run, hardware: Hardware, allow: frozenset[str]) -> Plans:
    """Plans under any launch."""
    return plans_of(search_of(run, hardware, LAUNCHED), allow)


def _launch(job: Job) -> str:
    """How to launch a job: with a shipped file, or with files that the planner writes."""
    file = FILES.get((job.zero_stage, job.offload))
    return f"--config_file {file}" if file else "the files that `trl-ext plan ... --write DIR` makes"


def _nothing_fits(run: Run, refused: Plans, hardware: Hardware, allow: frozenset[str]) -> str:
    reasons = " ".join(f"{refusal.reason}." for refusal in refused.refused[:3])
    other = _elsewhere(run, hardware, allow)
    advice = [sentence.replace("--allow ", "memory_allow=") for sentence in other.advice]
    if other.plans:
        best = other.best
        advice = [f"Launch with {_launch(best.job)}: {best.estimate.peak_gib:.1f} GiB, {best.label}.", *advice]
    words = " ".join(advice) or "Take more or larger cards, or see `trl-ext plan`."
    return f"Nothing that keeps the optimisation fits on {hardware} as launched. {reasons} {words}"


# Frozen -----------------------------------------------------------------------------------------------------------


def _frozen(run: Run, source: Source, planned: Job, allow: frozenset[str], hardware: Hardware) -> Plan:
    """A preset's or a file's settings on this run: its batch and lengths stay, and it must fit."""
    if planned.trainer != run.trainer:
        raise ConfigError(f"memory={source.name} is for {planned.trainer}, and this is a {run.trainer} run.")
    _check_launch(run, source, planned)
    _check_given(run, source, planned)
    fields = dict(run.fields) | _free_fields(run, planned, hardware)
    opt_ins = _opt_ins(run, source, planned, allow)
    if opt_ins:
        names = ("method", "optim", "lora_r", "lora_target_modules", "lora_dropout", "critic")
        fields |= {name: getattr(planned, name) for name in names if name not in run.given}
    job = changed(Job(run.trainer), fields)
    found = estimate(job, run.shape, hardware)
    if not found.fits:
        raise ConfigError(_outgrown(source, planned, found))
    return Plan(found, opt_ins)


def _check_launch(run: Run, source: Source, planned: Job) -> None:
    launched = (run.fields["zero_stage"], run.fields["offload"])
    wanted = (planned.zero_stage, planned.offload)
    if launched == wanted:
        return
    raise ConfigError(
        f"memory={source.name} is planned with {_engine(*wanted)}, and the run was launched with "
        f"{_engine(*launched)}. Launch with {_launch(planned)}, or say memory=auto."
    )


def _engine(stage: int, offload: str) -> str:
    engine = f"ZeRO-{stage}" if stage else "no DeepSpeed"
    return engine if offload == "none" else f"{engine} and {offload} offloaded"


def _check_given(run: Run, source: Source, planned: Job) -> None:
    """A setting of the user's that the plan was not made for. How much is generated at once is the run's affair."""
    for name in sorted(FREE & run.given - LAUNCHED - {"steps_per_generation"}):
        if run.fields.get(name, getattr(planned, name)) != getattr(planned, name):
            raise ConfigError(
                f"{name} is {run.fields[name]}, and memory={source.name} was planned with {getattr(planned, name)}. "
                f"{_instead(name, run, planned)}, or say memory=auto, which plans around it."
            )


def _instead(name: str, run: Run, planned: Job) -> str:
    if name == MICRO:  # accumulation decides it as well; the batch of the step is what its maker means
        return f"Give global_batch={run.fields['global_batch']} instead"
    if name == "dtype":
        return f"Load the model in {planned.dtype}"
    return f"Remove {name}"


def _free_fields(run: Run, planned: Job, hardware: Hardware) -> dict[str, Any]:
    """The plan's technique; of its micro-batch the largest part that divides the run's own batch."""
    fields = {name: getattr(planned, name) for name in (FREE | SIZES) - run.given - LAUNCHED}
    if run.trainer != "reward":
        fields.pop("activation_offloading", None)
    if "steps_per_generation" in fields:
        fields["steps_per_generation"] = 0  # a number of micro-batches, which are others here
    if "per_device_train_batch_size" in fields:
        job = changed(Job(run.trainer), {**run.fields, "per_device_train_batch_size": 1})
        sizes = micro_batches(Search(job, frozenset(), run.shape, hardware))
        fields["per_device_train_batch_size"] = max(
            (size for size in sizes if size <= planned.per_device_train_batch_size), default=1
        )
    return fields


def _opt_ins(run: Run, source: Source, planned: Job, allow: frozenset[str]) -> tuple[str, ...]:
    """Words that the plan needs and the user must give."""
    needed = []
    if planned.method != run.fields["method"] and planned.method != "full":
        needed.append(planned.method)
    if planned.optim != run.fields["optim"] and planned.optim != "adamw_torch_fused":
        needed.append("adam8bit")
    missing = [word for word in needed if word not in allow]
    if missing:
        raise ConfigError(
            f"memory={source.name} trains {_TRAINS[planned.method]}, and this run {_TRAINS[run.fields['method']]} "
            f"with {run.fields['optim']}. Allow it: memory_allow={','.join(missing)}; or say memory=auto."
        )
    return tuple(needed)


def _outgrown(source: Source, planned: Job, found: Estimate) -> str:
    job = found.job
    return (
        f"memory={source.name} was made for sequences of {planned.sequence_tokens} tokens and {technique(planned)}. "
        f"With {job.sequence_tokens} tokens of {found.case.shape.name} and {technique(job)} it needs "
        f"{found.reason()} (estimated). Say memory=auto, or plan again: `trl-ext plan`."
    )
