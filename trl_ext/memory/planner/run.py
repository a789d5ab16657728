"""The plan of a run with `memory`: the settings that a plan, a preset or a search chooses for it.

The trainers' `memory` and `trl-ext check` use it. Settings that the user gave stay, and the launch is fixed. Only
settings in `choices.FREE` change; the global batch never changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import HEADROOM_FRAC, Hardware, parse_gpus
from trl_ext.memory.contradictions import would_hold
from trl_ext.memory.files.launch import launched_with
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.options import OPTIONS
from trl_ext.memory.planner.choices import FREE, micro_batches
from trl_ext.memory.planner.folder import read_plan
from trl_ext.memory.planner.planner import Plan, Plans, plans_of
from trl_ext.memory.planner.presets import PRESETS
from trl_ext.memory.planner.search import Search, technique

AUTO = "auto"
MICRO = "per_device_train_batch_size"
LAUNCHED = frozenset({"zero_stage", "offload"})
# These change only by an opt-in, which the planner checks.
OPTED = frozenset({"method", "optim", "critic"})
SIZES = frozenset(
    {"reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "sub_group_size"}
)
ALL = frozenset(field.name for field in fields(Job))


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """The machine to plan for, and the plan if `memory` names a preset or a plan.

    Args:
        name: As the user wrote it.
        hardware: The cards; None for this machine's.
        job: The plan's; None to search.
    """

    name: str
    hardware: Hardware | None = None
    job: Job | None = None

    @property
    def kept_free_frac(self) -> float:
        """Share of a card that stays free: the plan's, or the default."""
        return self.hardware.headroom_frac if self.hardware else HEADROOM_FRAC


def parse_memory(memory: Any) -> MemorySetting:
    """Parse `memory`: "auto", cards ("4xA40-48GB"), a preset's name, a plan's folder or plan.json, or a `Plan`.

    Raises:
        ConfigError: An unknown name, with the nearest names; or a plan of another version.
    """
    if isinstance(memory, Plan):
        return MemorySetting(memory.label, memory.estimate.hardware, memory.job)
    text = str(memory).strip()
    if text == AUTO:
        return MemorySetting(text)
    if text in PRESETS:
        planned = PRESETS[text].plan()
        return MemorySetting(text, planned.estimate.hardware, planned.job)
    if Path(text).expanduser().exists() or "/" in text or text.endswith(".json"):
        found = read_plan(Path(text).expanduser())
        return MemorySetting(text, found.estimate.hardware, found.job)
    try:
        return MemorySetting(text, parse_gpus(text))
    except ConfigError as error:
        near = get_close_matches(text, PRESETS, n=2, cutoff=0.4)
        presets = f"Nearest presets: {', '.join(near)}. " if near else ""
        raise ConfigError(
            f"memory is {text!r}, which is neither auto, nor cards, nor a preset, nor the folder of a plan. {presets}"
            f"As cards: {error} A plan for it: `trl-ext plan --gpu_memory_gib ... --write DIR`, and memory=DIR."
        ) from error


@dataclass(frozen=True, slots=True)
class Run:
    """A run before its model loads.

    Args:
        job: Its settings, given or by default.
        given: Fields of `Job` that the user or the launch decided.
        num_processes: As launched, one for each GPU.
        local_processes: Processes on this machine.
    """

    job: Job
    given: frozenset[str]
    shape: ModelShape
    num_processes: int
    local_processes: int

    def search(self, hardware: Hardware, also_open: frozenset[str] = frozenset()) -> Search:
        """Return a search from this run, in which all settings that were not given, and `also_open`, are open. Raises
        ConfigError if the given settings cannot work."""
        is_open = ((FREE | SIZES | OPTED) - self.given) | also_open
        # The planner replaces DeepSpeed's defaults; a micro-batch of one divides every batch.
        default = Job(self.job.trainer)
        job = replace(self.job, **{name: getattr(default, name) for name in is_open & (SIZES | {MICRO})})
        search = Search(job, ALL - is_open, self.shape, hardware)
        search.check()
        return search

    def plans(self, hardware: Hardware, also_open: frozenset[str] = frozenset()) -> Plans:
        """Plan the run, with the settings of `search` open."""
        return plans_of(self.search(hardware, also_open), frozenset())


def settle(run: Run, setting: MemorySetting, machine: Callable[[], Hardware]) -> Plan:
    """Choose the settings for the run; `machine` finds this machine's cards if `setting` names none.

    Raises:
        ConfigError: Nothing fits as launched, with the launch that would; the launch or a given setting contradicts
            the plan; or the plan's method or optimizer is another.
    """
    hardware = replace(_hardware(run, setting, machine), headroom_frac=setting.kept_free_frac)
    if setting.job is not None:
        return _as_planned(run, setting, setting.job, hardware)
    plans = run.plans(hardware)
    if not plans.plans:
        otherwise = run.plans(hardware, LAUNCHED)
        instead = otherwise.advice_for_run
        if otherwise.plans:
            best = otherwise.best
            instead = (f"Launch with {_launch(best.job)}: {best.estimate.peak_gib:.1f} GiB, {best.label}.", *instead)
        nothing = f"Nothing that keeps the optimisation fits on {plans.search.hardware} as launched."
        instead = instead or ("Take more or larger cards, or see `trl-ext plan`.",)
        raise ConfigError(" ".join([nothing, plans.reasons, *instead]))
    return plans.best


def _launch(job: Job) -> str:
    return launched_with(job) or "the files that `trl-ext plan ... --write DIR` makes"


def _hardware(run: Run, setting: MemorySetting, machine: Callable[[], Hardware]) -> Hardware:
    """Return the cards to plan for: the cards in `memory`, or as many of this machine's as there are processes."""
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


def _as_planned(run: Run, setting: MemorySetting, planned: Job, hardware: Hardware) -> Plan:
    """Return the settings of a preset or a plan's folder where the user gave none, with the run's batch and lengths.

    Args:
        run: The run: its job, model and the settings that its user gave.
        setting: The value of `memory`, for messages.
        planned: The job of the preset or the plan's folder.
        hardware: Where the run takes place.

    Raises:
        ConfigError: The run is launched in another way, has another method or optimizer, or does not fit.
    """
    for name in ("trainer", "zero_stage", "offload", "fsdp", "sequence_parallel"):
        theirs, own = getattr(planned, name), getattr(run.job, name)
        if theirs != own:
            raise ConfigError(
                f"memory={setting.name} is planned with {name}={theirs}, and this run has {name}={own}. Start a "
                f"{planned.trainer} run with {_launch(planned)} and sequence_parallel={planned.sequence_parallel}, or "
                "set memory=auto."
            )
    if planned.method not in ("full", run.job.method) or planned.optim not in (Job("grpo").optim, run.job.optim):
        raise ConfigError(
            f"memory={setting.name} is planned with method={planned.method} and optim={planned.optim}, and this run "
            f"has method={run.job.method} and optim={run.job.optim}. Set the same (use_peft, load_in_4bit, "
            "optim), or memory=auto."
        )
    changes: dict[str, Any] = {name: getattr(planned, name) for name in (FREE | SIZES) - run.given - LAUNCHED}
    if "steps_per_generation" in changes:
        changes["steps_per_generation"] = 0  # the plan's number counts micro-batches of another size
    if MICRO in changes:  # the largest size that divides the run's batch
        sizes = micro_batches(Search(run.job, frozenset(), run.shape, hardware))
        changes[MICRO] = max((size for size in sizes if size <= changes[MICRO]), default=1)
    for option in OPTIONS:  # the run's own settings win: an option of the plan that contradicts them is left out
        if would_hold(option.conflict, run.job, changes):
            changes.pop(option.name, None)
    found = estimate(replace(run.job, **changes), run.shape, hardware)
    if not found.fits:
        job = found.job
        raise ConfigError(
            f"memory={setting.name} was made for sequences of {planned.sequence_tokens} tokens and "
            f"{technique(planned)}. With {job.sequence_tokens} tokens of {run.shape.name} and {technique(job)} it "
            f"needs {found.reason()} (estimated). Set memory=auto, or plan again: `trl-ext plan`."
        )
    return Plan(found)
