"""Changes to a run, or to a question of the planner, that does not fit: one table, from which both take their kinds.

Of a run: single changes that the optimisation does not see, cheapest first, and the next ZeRO stage or offload. All
GiB are estimated, by the planner's formulas: the difference that a setting makes is told as such, for the estimate of
the run itself may be what was wrong. Of a question: changes over all settings, in the order of what they cost the
user; the planner answers it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS
from trl_ext.memory.files.launch import launched_with
from trl_ext.memory.formulas.estimate import Estimate
from trl_ext.memory.formulas.peak import slack_bytes
from trl_ext.memory.job import Job, changed, check_batch
from trl_ext.memory.planner.choices import CHECKPOINTING, FREE, TECHNIQUES, fewer_at_once, most_frugal, techniques
from trl_ext.memory.planner.search import OF_SERVERS, Search, ppo_defaults
from trl_ext.memory.units import gib

NUM_ALTERNATIVES = 3
WORTH_GIB = 0.1  # a setting that saves less is none
WORTH_A_SERVER = 1.25  # a server, which is started apart, beside vLLM on the training GPUs
WORTH_A_BUCKET = 1.15  # sending gradients while backward goes on: what the clock can tell apart
LARGEST_MACHINE = 8  # cards


@dataclass(frozen=True, slots=True)
class Alternative:
    """One setting of a run, or of the planner's question, changed.

    Args:
        search, allow: The question then; its job is the run then.
        kind: Of several of a kind the first that helps is enough; "" for any number.
        option: As `trl-ext plan` takes it: "--allow lora"; "" for what the planner chooses by itself.
        key: As a run takes it: "memory_allow=lora"; "" for what a run cannot change.
        opt_in: The opt-in that it gives, "" for another setting.
        worth: How many times faster it must be to be mentioned beside plans that fit.
        saves_gib: In the phase that ran out of memory, of a run.
    """

    search: Search
    allow: frozenset[str] = frozenset()
    kind: str = ""
    option: str = ""
    key: str = ""
    opt_in: str = ""
    worth: float = 1.0
    saves_gib: float = 0.0

    @property
    def estimate(self) -> Estimate:
        """The run with the change."""
        return self.search.estimate(self.search.job)

    def then(self, other: "Alternative") -> "Alternative":
        """This change and another one of the question that it leaves."""
        return replace(other, option=f"{self.option} {other.option}", key="", opt_in=self.opt_in or other.opt_in)

    def where(self, **settings: Any) -> "Alternative":
        """The same of a run with other settings, which are known to go together."""
        return replace(self, search=replace(self.search, job=replace(self.search.job, **settings)))


def alternatives(now: Estimate, phase: str = "", asked_gib: float | None = None) -> list[Alternative]:
    """The cheapest changes that save memory in a phase: those with which the run fits, by the seconds that they cost;
    at most three, of different kinds.

    Args:
        now: The run as it is, whether it fits or not.
        phase: One of `PHASES` of the formulas, "" for the run's worst.
        asked_gib: What could not be allocated; what saves less is named only if nothing saves as much.
    """
    before = _need_gib(now, phase)
    found = [replace(one, saves_gib=before - _need_gib(one.estimate, phase)) for one in of_a_run(_search(now))]
    found = [one for one in found if one.saves_gib >= WORTH_GIB]
    enough = [one for one in found if one.saves_gib >= (asked_gib or 0.0)]
    # Of changes that cost no time the simplest stands first, the allocator's.
    ranked = sorted(enough or found, key=lambda one: (not one.estimate.fits, max(one.estimate.step_s, now.step_s)))
    kinds = dict.fromkeys(one.kind for one in ranked)
    return [next(one for one in ranked if one.kind == kind) for kind in kinds][:NUM_ALTERNATIVES]


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


def _later_stages(search: Search) -> list[Job]:
    """The job under every ZeRO stage and offload that comes after its own."""
    here = (search.job.zero_stage, search.job.offload)
    place = TECHNIQUES.index(here) if here in TECHNIQUES else len(TECHNIQUES)
    return [one for one in techniques(search) if TECHNIQUES.index((one.zero_stage, one.offload)) > place]


# The changes --------------------------------------------------------------------------------------------------------


def of_a_run(search: Search) -> Iterator[Alternative]:
    """Every single change that the optimisation does not see and a run can have."""
    job = search.job

    def change(kind: str, key: str, **settings: Any) -> Alternative:
        return Alternative(search, kind=kind, key=key).where(**settings)

    if not job.expandable_segments:
        key = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        yield change("allocator", key, expandable_segments=True)
    if (size := job.per_device_train_batch_size) > 1:
        part = largest_part(size)
        smaller = change("batch", "", per_device_train_batch_size=part)
        steps = smaller.search.job.accumulation(search.num_gpus)
        yield replace(smaller, key=f"per_device_train_batch_size={part} gradient_accumulation_steps={steps}")
    budget = 2 * job.sequence_tokens  # one pair
    if not job.generates and job.packing and job.row_tokens > budget:
        yield change("budget", f"max_tokens_per_forward={budget}", max_tokens_per_forward=budget)
    yield from _shared_rows(Alternative(search))
    for every, offloads in CHECKPOINTING[CHECKPOINTING.index((1, False)) :]:
        if not (offloads and job.generates):
            key = "gradient_checkpointing=True" + (" activation_offloading=True" if offloads else "")
            key += ", every layer" if job.checkpoint_every > 1 else ""
            yield change("checkpointing", key, checkpoint_every=every, activation_offloading=offloads)
    if job.shares_with_vllm and not job.vllm_enable_sleep_mode:
        yield change("vllm", "vllm_enable_sleep_mode=True", vllm_enable_sleep_mode=True)
    for one in fewer_at_once(search, job) if job.generates and not job.use_vllm else ():
        key = f"steps_per_generation={one.steps_per_generation}"
        yield change("generated at once", key, steps_per_generation=one.steps_per_generation)
    for one in _later_stages(search):
        key = launched_with(one) or f"zero_stage={one.zero_stage} offload={one.offload}"
        key += "" if one.dtype == job.dtype else f" dtype={one.dtype}"
        yield change("launch", key, zero_stage=one.zero_stage, offload=one.offload, dtype=one.dtype)


def of_a_question(search: Search, allow: frozenset[str]) -> Iterator[Alternative]:
    """Every single change of a question that may make something fit: first what the optimisation does not see, then
    the method, Adam in 8 bits, less at once, and more cards."""
    now, given = Alternative(search, allow), sorted(FREE & search.given)
    # Settings that are the planner's to choose, and that the user gave: each, and all of them.
    for names in [[name] for name in given] + ([given] if len(given) > 1 else []):
        option = " ".join(["without", *(f"--{name}" for name in names)])
        yield replace(now, option=option, search=replace(search, given=search.given.difference(names)))
    yield from _shared_rows(now)
    if search.job.use_vllm:
        none = {"use_vllm": False, "vllm_mode": "colocate", "vllm_servers": 0}
        yield from _asked(replace(now, option="without --use_vllm", key="use_vllm=False"), **none)
        yield from _other_vllm_mode(now)
    yield from _other_methods(now)
    if search.job.method == "full" and search.may("optim"):
        yield from _allowed(now, "adam8bit")
    yield from _allowed(now, *(("shorter", "fewer") if search.job.trainer == "grpo" else ("shorter",)))
    # Twice, four and eight times the cards: in one machine up to eight, then more machines.
    cards = search.hardware
    for count in (cards.num_gpus * times for times in (2, 4, 8)):
        each = min(count // cards.num_machines, max(LARGEST_MACHINE, cards.gpus_per_machine))
        if count % each == 0:
            more = replace(cards, num_gpus=count, num_machines=count // each)
            if not _divides(search.job, count):
                return
            yield replace(now, option=f"--gpus {more}", kind="cards", search=replace(search, hardware=more))


def of_larger_cards(search: Search, allow: frozenset[str]) -> Iterator[Alternative]:
    """As many cards of each kind with more memory, the smallest first."""
    for card in sorted(CARDS, key=lambda one: one.total_gib):
        if card.total_gib > search.hardware.card.total_gib and (card.has_bf16 or search.job.fp16):
            larger = replace(search, hardware=replace(search.hardware, card=card))
            yield Alternative(larger, allow, "larger card", f"--gpus {larger.hardware}")


def of_an_answer(search: Search, allow: frozenset[str]) -> Iterator[Alternative]:
    """Changes of a question that has an answer: vLLM where there is none, a server for it, adapters."""
    now = Alternative(search, allow)
    if search.job.generates and search.may("use_vllm"):
        yield from _asked(replace(now, option="--use_vllm"), use_vllm=True)
    elif search.job.shares_with_vllm and search.may("vllm_mode"):
        yield from _other_vllm_mode(replace(now, worth=WORTH_A_SERVER))
    stage = search.job.zero_stage if not search.may("zero_stage") else 2
    if search.num_gpus > 1 and stage in (1, 2) and search.may("overlap_comm") and not search.job.fsdp:
        overlapping = replace(now, option="--overlap_comm", worth=WORTH_A_BUCKET)
        yield from _asked(overlapping, overlap_comm=True, zero_stage=stage)
    # A question that is always asked.
    yield from (replace(one, worth=0.0) for one in _other_methods(now) if one.opt_in == "lora")


def _asked(change: Alternative, **settings: Any) -> Iterator[Alternative]:
    """The change with these settings of its question, if they go together."""
    try:
        other = replace(change.search, job=changed(change.search.job, settings))
        other.placed()
    except ConfigError:
        return
    yield replace(change, search=other)


def _allowed(now: Alternative, *names: str) -> Iterator[Alternative]:
    """The opt-ins of these names that the question lacks."""
    for name in (name for name in names if name not in now.allow):
        kind = "method" if name in ("lora", "qlora") else ""
        yield Alternative(now.search, now.allow | {name}, kind, f"--allow {name}", f"memory_allow={name}", name)


def _divides(job: Job, num_gpus: int) -> bool:
    try:
        check_batch(job, num_gpus)
    except ConfigError:
        return False
    return True


def _shared_rows(now: Alternative) -> Iterator[Alternative]:
    """Rows that more GPUs of a machine share."""
    job, hardware = now.search.job, now.search.hardware
    if not job.packing or job.fsdp or now.search.shape.experts is not None:
        return
    for size in range(job.sequence_parallel + 1, hardware.gpus_per_machine + 1):
        option, key = f"--sequence_parallel {size}", f"sequence_parallel={size}"
        one = replace(now, kind="shared rows", option=option, key=key).where(sequence_parallel=size)
        if hardware.gpus_per_machine % size == 0 and _divides(one.search.job, hardware.num_gpus):
            yield one


def _other_vllm_mode(now: Alternative) -> Iterator[Alternative]:
    free = replace(now, search=replace(now.search, given=now.search.given - OF_SERVERS))
    if now.search.job.vllm_mode == "server":
        colocated = replace(free, option="--vllm_mode colocate")
        yield from _asked(colocated, vllm_mode="colocate", vllm_servers=0)
    elif now.search.hardware.num_machines == 1:
        yield from _asked(replace(free, option="--vllm_mode server"), vllm_mode="server")


def _other_methods(now: Alternative) -> Iterator[Alternative]:
    """Adapters, and adapters on a 4-bit base, also if the user gave another method."""
    search, job = now.search, now.search.job
    for name in ("lora", "qlora")[("full", "lora", "qlora").index(job.method) :]:
        if name in now.allow:
            continue
        if job.method == "full" and search.may("method"):
            yield from _allowed(now, name)
            continue
        is_freed = job.method == "full" and job.critic != "none"
        freed = search.given - {"critic", "reward_model"} if is_freed else search.given
        critic = job.critic if "critic" in freed else None
        settings = {**ppo_defaults(job.trainer, name, freed, critic), "method": name}
        key = "load_in_4bit=True" if job.method == "lora" else ""
        yield from _asked(replace(now, kind="method", option=f"--method {name}", key=key), **settings)
