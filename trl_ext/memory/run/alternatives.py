"""Alternatives to a run that does not fit: single changes, cheapest first, and the next ZeRO stage or offload.

All GiB are estimated, by the planner's formulas: the difference that a setting makes is told as such, for the estimate
of the run itself may be what was wrong. Whole plans come from the planner: `Run.plans`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trl_ext.memory.estimate import Estimate
from trl_ext.memory.files.launch import launched_with
from trl_ext.memory.formulas.peak import slack_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.planner.choices import CHECKPOINTING, TECHNIQUES, fewer_at_once, most_frugal, techniques
from trl_ext.memory.planner.search import Search
from trl_ext.memory.units import gib

NUM_ALTERNATIVES = 3
WORTH_GIB = 0.1  # a setting that saves less is none


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change that keeps the optimisation and needs less memory.

    Args:
        kind: Of several of a kind the cheapest is enough.
        change: What to set, as it is written: "--config_file zero3".
        estimate: Of the run with the change.
        saves_gib: In the phase that ran out of memory.
    """

    kind: str
    change: str
    estimate: Estimate
    saves_gib: float

    @property
    def fits(self) -> bool:
        """True if the run fits with the change."""
        return self.estimate.fits

    @property
    def need_gib(self) -> float:
        """GiB of the whole run with the change, in its worst phase."""
        return gib(self.estimate.need_bytes)


def alternatives(now: Estimate, phase: str = "", asked_gib: float | None = None) -> list[Alternative]:
    """The cheapest changes that save memory in a phase, by seconds of a step; at most three, of different kinds.

    Args:
        now: The run as it is, whether it fits or not.
        phase: One of `PHASES` of the formulas, "" for the run's worst.
        asked_gib: What could not be allocated; what saves less is named only if nothing saves as much.
    """
    search = _search(now)
    found = []
    for kind, change, job in _changes(search):
        then = search.estimate(job)
        saved = _need_gib(now, phase) - _need_gib(then, phase)
        if saved >= WORTH_GIB:
            found.append(Alternative(kind, change, then, saved))
    enough = [one for one in found if one.saves_gib >= (asked_gib or 0.0)]
    ranked = sorted(enough or found, key=lambda one: one.estimate.step_s)
    cheapest = {one.kind: one for one in reversed(ranked)}
    return sorted(cheapest.values(), key=lambda one: one.estimate.step_s)[:NUM_ALTERNATIVES]


def next_stage(now: Estimate) -> Estimate | None:
    """The next ZeRO stage and offload that fits, at its most frugal; else the next one at all; None on the last."""
    search = _search(now)
    least = [
        min(map(search.estimate, most_frugal(search, job)), key=lambda one: one.need_bytes)
        for job in _later_stages(search)
    ]
    return next((one for one in least if one.fits), least[0] if least else None)


def largest_part(size: int) -> int:
    """The next smaller micro-batch that keeps the global batch: 9 becomes 3, and 5 becomes 1."""
    return max(part for part in range(1, size // 2 + 1) if size % part == 0)


def _search(now: Estimate) -> Search:
    """A search that starts where the run stands and may choose everything that a plan may."""
    return Search(now.job, frozenset(), now.shape, now.hardware)


def _need_gib(estimate: Estimate, phase: str) -> float:
    """GiB reserved in the phase at its worst."""
    peak = estimate.worst.get(phase)
    return gib(estimate.need_bytes if peak is None else peak.num_bytes + slack_bytes(peak, estimate.job))


def _changes(search: Search) -> Iterator[tuple[str, str, Job]]:
    """Every single change that the optimisation does not see: its kind, how it is written, and the job then."""
    job = search.job
    if not job.expandable_segments:
        written = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        yield "allocator", written, replace(job, expandable_segments=True)
    yield from _smaller_forwards(job, search.hardware.num_gpus)
    for every, offloads in CHECKPOINTING[CHECKPOINTING.index((1, False)) :]:
        if not (offloads and job.generates):
            written = "gradient_checkpointing=True" + (" activation_offloading=True" if offloads else "")
            written += ", every layer" if job.checkpoint_every > 1 else ""
            yield "checkpointing", written, replace(job, checkpoint_every=every, activation_offloading=offloads)
    if job.use_vllm:
        if not job.vllm_enable_sleep_mode:
            yield "vllm", "vllm_enable_sleep_mode=True", replace(job, vllm_enable_sleep_mode=True)
    elif job.generates:
        for one in fewer_at_once(search, job):
            yield "generated at once", f"steps_per_generation={one.steps_per_generation}", one
    for one in _later_stages(search):
        written = launched_with(one.zero_stage, one.offload) or f"zero_stage={one.zero_stage} offload={one.offload}"
        yield "launch", written if one.dtype == job.dtype else f"{written} dtype={one.dtype}", one


def _smaller_forwards(job: Job, num_gpus: int) -> Iterator[tuple[str, str, Job]]:
    size = job.per_device_train_batch_size
    if size > 1:
        part = largest_part(size)
        smaller = replace(job, per_device_train_batch_size=part)
        steps = smaller.accumulation(num_gpus)
        yield "batch", f"per_device_train_batch_size={part} gradient_accumulation_steps={steps}", smaller
    budget = 2 * job.sequence_tokens  # one pair
    if not job.generates and job.packing and job.forward_tokens > budget:
        yield "budget", f"max_tokens_per_forward={budget}", replace(job, max_tokens_per_forward=budget)


def _later_stages(search: Search) -> list[Job]:
    """The job under every ZeRO stage and offload that comes after its own."""
    here = (search.job.zero_stage, search.job.offload)
    place = TECHNIQUES.index(here) if here in TECHNIQUES else len(TECHNIQUES)
    return [one for one in techniques(search) if TECHNIQUES.index((one.zero_stage, one.offload)) > place]
