"""What would fit instead: the cheapest settings that keep the optimisation, and the next rung of the ladder.

All GiB are estimated, by the planner's formulas: the difference that a setting makes is told as such, for the estimate
of the run itself may be what was wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trl_ext.memory.estimate import Estimate, quick_estimate
from trl_ext.memory.formulas.phases import slack_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.planner.ladder import CHECKPOINTING, TECHNIQUES, Search, fewer_at_once, most_frugal, techniques
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.planner.words import describe
from trl_ext.memory.run.settle import FILES
from trl_ext.memory.units import gib

NUM_REMEDIES = 3
WORTH_GIB = 0.1  # a setting that saves less is none


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that needs less.

    Args:
        kind: Of several of a kind the cheapest is enough.
        settings: As they are written: "--config_file zero3".
        saves_gib: In the phase that ran out of memory.
        need_gib: Of the whole run then, at its worst moment.
        step_s: Seconds of an optimizer step then.
    """

    kind: str
    settings: str
    saves_gib: float
    need_gib: float
    step_s: float


def remedies(plan: Plan, phase: str, asked_gib: float | None = None) -> list[Remedy]:
    """The cheapest ones, in seconds of a step, that save memory in the phase; at most three, of different kinds.

    Args:
        plan: The run's.
        phase: Of `trl_ext.memory.formulas.phases.PHASES`, "" for the run's worst.
        asked_gib: What could not be had; what saves less is named only if nothing saves as much.
    """
    now = plan.estimate
    found = []
    for kind, settings, job in _choices(now):
        then = quick_estimate(job, now.case.shape, now.case.hardware)
        saved = _need_gib(now, phase) - _need_gib(then, phase)
        if saved >= WORTH_GIB:
            found.append(Remedy(kind, settings, saved, gib(then.need_bytes), then.step_s))
    enough = [one for one in found if one.saves_gib >= (asked_gib or 0.0)]
    ranked = sorted(enough or found, key=lambda one: one.step_s)
    cheapest = {one.kind: one for one in reversed(ranked)}
    return sorted(cheapest.values(), key=lambda one: one.step_s)[:NUM_REMEDIES]


def _need_gib(estimate: Estimate, phase: str) -> float:
    """Reserved in the phase at its worst."""
    moment = estimate.worst.get(phase)
    return gib(estimate.need_bytes if moment is None else moment.num_bytes + slack_bytes(moment, estimate.job))


def _choices(now: Estimate) -> Iterator[tuple[str, str, Job]]:
    """Every step away from the job that the optimisation does not see: its kind, how it is written, the job then."""
    job = now.job
    if not job.expandable_segments:
        written = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        yield "allocator", written, replace(job, expandable_segments=True)
    yield from _smaller(job, now.case.hardware.num_gpus)
    yield from _checkpointed(job)
    search = _search(now)
    if job.use_vllm:
        if not job.vllm_enable_sleep_mode:
            yield "vllm", "vllm_enable_sleep_mode=True", replace(job, vllm_enable_sleep_mode=True)
    elif job.generates:
        for one in fewer_at_once(search, job):
            yield "generated at once", f"steps_per_generation={one.steps_per_generation}", one
    for one in _later_rungs(search):
        yield "ladder", _launch(job, one), one


def _smaller(job: Job, num_gpus: int) -> Iterator[tuple[str, str, Job]]:
    size = job.per_device_train_batch_size
    if size > 1:
        smaller = replace(job, per_device_train_batch_size=size // 2 if size % 2 == 0 else 1)
        written = f"per_device_train_batch_size={smaller.per_device_train_batch_size}"
        yield "batch", f"{written} gradient_accumulation_steps={smaller.accumulation(num_gpus)}", smaller
    budget = 2 * job.sequence_tokens  # one pair
    if not job.generates and job.packing and job.forward_tokens > budget:
        yield "budget", f"max_tokens_per_forward={budget}", replace(job, max_tokens_per_forward=budget)


def _checkpointed(job: Job) -> Iterator[tuple[str, str, Job]]:
    for every, offloads in CHECKPOINTING[CHECKPOINTING.index((1, False)) :]:
        if offloads and job.generates:
            continue
        more = replace(job, checkpoint_every=every, activation_offloading=offloads)
        written = "gradient_checkpointing=True" + (" activation_offloading=True" if offloads else "")
        if job.checkpoint_every > 1:
            written += ", every layer"
        yield "checkpointing", written, more


def _search(now: Estimate) -> Search:
    """All that a plan may turn, where the run stands."""
    return Search(now.job, frozenset(), now.case.shape, now.case.hardware)


def _later_rungs(search: Search) -> list[Job]:
    """The job under what comes after its own ZeRO stage and offload."""
    here = (search.job.zero_stage, search.job.offload)
    place = TECHNIQUES.index(here) if here in TECHNIQUES else len(TECHNIQUES)
    return [one for one in techniques(search) if TECHNIQUES.index((one.zero_stage, one.offload)) > place]


def _launch(before: Job, job: Job) -> str:
    file = FILES.get((job.zero_stage, job.offload))
    written = f"--config_file {file}" if file else f"zero_stage={job.zero_stage} offload={job.offload}"
    return written if job.dtype == before.dtype else f"{written} dtype={job.dtype}"


def next_rung(plan: Plan) -> str:
    """The next technique that fits at its most frugal, in words with its GiB; else the next one; "" on the last."""
    search = _search(plan.estimate)
    least = [
        min(map(search.estimate, most_frugal(search, job)), key=lambda one: one.need_bytes)
        for job in _later_rungs(search)
    ]
    if not least:
        return ""
    rung = next((one for one in least if one.fits), least[0])
    return f"{describe(rung.job, search.hardware.num_gpus)}: {gib(rung.need_bytes):.1f} GiB"
