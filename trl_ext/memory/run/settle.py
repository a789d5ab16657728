"""Settle one run's settings: what `memory` names, held against what the user set and how the run was launched.

Contract: what the user gave stays, and the launch is a fact. Without an opt-in in `allow` only settings in
`choices.FREE` change, and the global batch never does.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, HEADROOM_FRAC, Hardware, parse_gpus
from trl_ext.memory.files.launch import launched_with
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.choices import FREE, micro_batches
from trl_ext.memory.planner.folder import read_plan
from trl_ext.memory.planner.planner import Plan, Plans, plans_of
from trl_ext.memory.planner.presets import PRESETS, preset
from trl_ext.memory.planner.search import Search, technique
from trl_ext.memory.run.keys import written

AUTO = "auto"
MICRO = "per_device_train_batch_size"
LAUNCHED = frozenset({"zero_stage", "offload"})
# These change by an opt-in of the user only, which the planner sees to.
OPTED = frozenset({"method", "optim", "critic"})
SIZES = frozenset(
    {"reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "sub_group_size"}
)
ALL = frozenset(field.name for field in fields(Job))
MUCH_FASTER = 1.25  # another launch is mentioned if a step takes so many times less
_TRAINS = {"full": "all weights", "lora": "adapters", "qlora": "adapters on a 4-bit base"}


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """The machine to plan for, and the plan if it is a frozen one.

    Args:
        name: As the user wrote it.
        hardware: The cards; None for those of this machine.
        job: The frozen plan's; None where the settings are to be searched.
        headroom_frac: Share of a card that stays free; None for that of the cards, or of the frozen plan.
    """

    name: str
    hardware: Hardware | None = None
    job: Job | None = None
    headroom_frac: float | None = None

    @property
    def kept_free_frac(self) -> float:
        """Share of a card that stays free."""
        planned = self.hardware.headroom_frac if self.hardware else HEADROOM_FRAC
        return planned if self.headroom_frac is None else self.headroom_frac


def parse_memory(memory: Any) -> MemorySetting:
    """Parse the value of `memory`.

    Args:
        memory: "auto", cards ("4xA40-48GB"), a preset's name, a plan's folder or plan.json, or a `Plan`.

    Raises:
        ConfigError: It names nothing, with the nearest names; or a plan of another version.
    """
    if isinstance(memory, Plan):
        return MemorySetting(memory.label, memory.estimate.hardware, memory.job)
    text = str(memory).strip()
    if text == AUTO:
        return MemorySetting(text)
    if text in PRESETS:
        return MemorySetting(text, parse_gpus(preset(text).gpus), preset(text).job)
    if Path(text).expanduser().exists() or "/" in text or text.endswith(".json"):
        found = read_plan(Path(text).expanduser())
        return MemorySetting(text, found.estimate.hardware, found.job)
    try:
        return MemorySetting(text, parse_gpus(text))
    except ConfigError as error:
        count, _, card = text.rpartition("x")
        prefix = f"{count}x" if count.isdigit() else ""
        cards = [f"{prefix}{one.name}" for one in CARDS]
        sizes = [name for name in cards if card.lower() in name.lower()]  # "2xA100" leaves its size open
        near = sizes or get_close_matches(text, cards if prefix else [*PRESETS, *cards], n=3, cutoff=0.5)
        raise ConfigError(
            f"memory is {text!r}, which is neither auto, nor cards, nor a preset, nor the folder of a plan. Nearest: "
            f"{', '.join(near[:3]) or '4xA40-48GB'}. For a card that is not in the table write a plan: `trl-ext plan "
            "--gpu_memory_gib ... --write DIR`, and memory=DIR."
        ) from error


@dataclass(frozen=True, slots=True)
class Run:
    """A run before its model loads.

    Args:
        job: Its settings, given or by default.
        given: Fields of `Job` that the user, or the launch, decided.
        shape: Its model.
        num_processes: As launched, one for each GPU.
        local_processes: How many of them are on this machine.
    """

    job: Job
    given: frozenset[str]
    shape: ModelShape
    num_processes: int
    local_processes: int

    def search(self, hardware: Hardware, also_open: frozenset[str] = frozenset()) -> Search:
        """The run as it is, with everything open that was not given, and `also_open`.

        Raises:
            ConfigError: The given settings cannot work.
        """
        is_open = ((FREE | SIZES | OPTED) - self.given) | also_open
        # DeepSpeed's defaults give way to the planner's, and every micro-batch divides what one sample divides.
        default = Job(self.job.trainer)
        job = replace(self.job, **{name: getattr(default, name) for name in is_open & (SIZES | {MICRO})})
        search = Search(job, ALL - is_open, self.shape, hardware)
        search.check()
        return search

    def plans(self, hardware: Hardware, allow: frozenset[str], also_open: frozenset[str] = frozenset()) -> Plans:
        """Plans for the run with everything open that was not given, and `also_open`."""
        return plans_of(self.search(hardware, also_open), allow)


def settle(run: Run, setting: MemorySetting, allow: frozenset[str], machine: Callable[[], Hardware]) -> Plan:
    """Settings for the run.

    Args:
        run: What is known.
        setting: What `memory` names.
        allow: Opt-ins of the user.
        machine: Looks at the cards of this machine.

    Raises:
        ConfigError: Nothing fits as launched, with the launch that would; the launch or a given setting contradicts
            the plan; or the plan needs an opt-in.
    """
    hardware = replace(_hardware(run, setting, machine), headroom_frac=setting.kept_free_frac)
    if setting.job is not None:
        return _frozen(run, setting, setting.job, allow, hardware)
    plans = run.plans(hardware, allow)
    if not plans.plans:
        otherwise = run.plans(hardware, allow, LAUNCHED)
        instead = otherwise.advice_for_run
        if otherwise.plans:
            best = otherwise.best
            instead = (f"Launch with {_launch(best.job)}: {best.estimate.peak_gib:.1f} GiB, {best.label}.", *instead)
        nothing = f"Nothing that keeps the optimisation fits on {plans.search.hardware} as launched."
        instead = instead or ("Take more or larger cards, or see `trl-ext plan`.",)
        raise ConfigError(" ".join([nothing, plans.reasons, *instead]))
    return plans.best


def faster_launch(run: Run, plan: Plan, allow: frozenset[str]) -> str:
    """A sentence if another launch makes steps much faster; "" if none does."""
    other = run.plans(plan.estimate.hardware, allow, LAUNCHED).best
    if other.estimate.step_s * MUCH_FASTER > plan.estimate.step_s:
        return ""
    then, now = other.estimate.in_seconds(), plan.estimate.in_seconds()
    return (
        f"Launched with {_launch(other.job)}, an optimizer step takes about {then} s instead of {now} "
        f"(estimated, rough)."
    )


def _launch(job: Job) -> str:
    return launched_with(job) or "the files that `trl-ext plan ... --write DIR` makes"


def _hardware(run: Run, setting: MemorySetting, machine: Callable[[], Hardware]) -> Hardware:
    """The cards to plan for: those that `memory` names, or as many of this machine as there are processes."""
    if setting.hardware is None:
        found = machine()
        if run.local_processes > found.num_gpus:
            raise ConfigError(
                f"{run.local_processes} processes were launched here, and there are {found.num_gpus} cards. Launch "
                "one process for each card."
            )
        machines = max(run.num_processes // max(run.local_processes, 1), 1)
        return replace(found, num_gpus=run.num_processes, num_machines=machines)
    trains = setting.job.training_gpus(setting.hardware.num_gpus) if setting.job else setting.hardware.num_gpus
    if trains != run.num_processes:
        counted = "1 process was" if run.num_processes == 1 else f"{run.num_processes} processes were"
        served = setting.hardware.num_gpus - trains
        server = f", {served} of them for vLLM servers" if served else ""
        raise ConfigError(
            f"memory={setting.name} is for {setting.hardware}{server}, and {counted} launched. Launch with "
            f"--num_processes {trains}, or set memory={run.num_processes}x{setting.hardware.card.name}."
        )
    return replace(setting.hardware, num_gpus=trains)


# A frozen plan ----------------------------------------------------------------------------------------------------


def _frozen(run: Run, setting: MemorySetting, planned: Job, allow: frozenset[str], hardware: Hardware) -> Plan:
    """A preset's or a file's settings on this run: its batch and lengths stay, and it must fit."""
    if planned.trainer != run.job.trainer:
        raise ConfigError(f"memory={setting.name} is for {planned.trainer}, and this is a {run.job.trainer} run.")
    if any(getattr(run.job, name) != getattr(planned, name) for name in ("zero_stage", "offload", "fsdp")):
        raise ConfigError(
            f"memory={setting.name} is planned with {_engine(planned)}, and the run was launched with "
            f"{_engine(run.job)}. Launch with {_launch(planned)}, or set memory=auto."
        )
    if run.job.sequence_parallel != planned.sequence_parallel:
        raise ConfigError(
            f"memory={setting.name} is planned with sequence_parallel={planned.sequence_parallel}, and this run has "
            f"{run.job.sequence_parallel}. Set sequence_parallel={planned.sequence_parallel}, or set memory=auto."
        )
    _check_given(run, setting, planned)
    # The technique is the plan's; of its micro-batch the largest part that divides the run's own batch.
    changes: dict[str, Any] = {name: getattr(planned, name) for name in (FREE | SIZES) - run.given - LAUNCHED}
    if "steps_per_generation" in changes:
        changes["steps_per_generation"] = 0  # a number of micro-batches, which are others here
    if MICRO in changes:
        sizes = micro_batches(Search(run.job, frozenset(), run.shape, hardware))
        changes[MICRO] = max((size for size in sizes if size <= changes[MICRO]), default=1)
    opt_ins = _opt_ins(run, setting, planned, allow)
    if opt_ins:
        names = OPTED | {"lora_r", "lora_target_modules", "lora_dropout"}
        changes |= {name: getattr(planned, name) for name in names - run.given}
    found = estimate(replace(run.job, **changes), run.shape, hardware)
    if not found.fits:
        job = found.job
        raise ConfigError(
            f"memory={setting.name} was made for sequences of {planned.sequence_tokens} tokens and "
            f"{technique(planned)}. With {job.sequence_tokens} tokens of {run.shape.name} and {technique(job)} it "
            f"needs {found.reason()} (estimated). Say memory=auto, or plan again: `trl-ext plan`."
        )
    return Plan(found, opt_ins)


def _engine(job: Job) -> str:
    engine = "FSDP2" if job.fsdp else f"ZeRO-{job.zero_stage}" if job.zero_stage else "no DeepSpeed"
    return engine if job.offload == "none" else f"{engine} and {job.offload} offloaded"


def _check_given(run: Run, setting: MemorySetting, planned: Job) -> None:
    """Check the user's settings against those that the plan was made with.

    How much is generated at once is the run's affair, and vLLM's settings count only where it is used.
    """
    job = run.job
    for name in sorted(FREE & run.given - LAUNCHED - {"steps_per_generation"}):
        given, wanted = getattr(job, name), getattr(planned, name)
        if given == wanted or (name.startswith("vllm_") and not job.use_vllm):
            continue
        remedy = {
            # Accumulation decides it as well; the batch of the step is what its user means.
            MICRO: f"Give global_batch={job.global_batch} instead",
            "dtype": f"Load the model in {planned.dtype}",
        }.get(name, f"Remove {written(name, given)[0]}")
        (key, value), (planned_key, planned_value) = written(name, given), written(name, wanted)
        other = planned_value if key == planned_key else f"{planned_key}={planned_value}"
        raise ConfigError(
            f"{key} is {value}, and memory={setting.name} was planned with {other}. {remedy}, or set memory=auto, "
            "which plans around it."
        )


def _opt_ins(run: Run, setting: MemorySetting, planned: Job, allow: frozenset[str]) -> tuple[str, ...]:
    """Opt-ins that the plan needs.

    Raises:
        ConfigError: The user did not give them.
    """
    needed = []
    if planned.method != run.job.method and planned.method != "full":
        needed.append(planned.method)
    if planned.optim != run.job.optim and planned.optim != "adamw_torch_fused":
        needed.append("adam8bit")
    missing = [name for name in needed if name not in allow]
    if missing:
        raise ConfigError(
            f"memory={setting.name} trains {_TRAINS[planned.method]}, and this run {_TRAINS[run.job.method]} "
            f"with {run.job.optim}. Allow it: memory_allow={','.join(missing)}; or set memory=auto."
        )
    return tuple(needed)
