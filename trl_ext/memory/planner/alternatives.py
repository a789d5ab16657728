"""Changes to a run that does not fit, or to a question to the planner, from one table.

Changes to a run do not affect the optimisation: single settings, cheapest first, and the next ZeRO stage or offload.
Their GiB are estimated, and given as differences, because the estimate of the run itself may have been wrong. Changes
to a question cover all settings, in the order of their cost to the user; the planner answers the changed question.
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
from trl_ext.memory.planner.choices import FREE, TECHNIQUES, checkpointing, fewer_at_once, most_frugal, techniques
from trl_ext.memory.planner.search import OF_SERVERS, Search, ppo_defaults
from trl_ext.memory.units import gib

NUM_ALTERNATIVES = 3
WORTH_GIB = 0.1  # a setting that saves less is not named
WORTH_A_SERVER = 1.25  # speed-up of a separate server over vLLM on the training GPUs
WORTH_A_BUCKET = 1.15  # speed-up of sending gradients during backward; smaller ones are below the clock's precision
LARGEST_MACHINE = 8  # cards
_KEYS = {  # settings of a run, by opt-in
    "lora": "LoRA (use_peft)",
    "qlora": "QLoRA (use_peft, load_in_4bit)",
    "adam8bit": "8-bit Adam (optim: adamw_bnb_8bit)",
}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One changed setting of a run, or of a question to the planner.

    Args:
        search, allow: The changed question; its job is the changed run.
        kind: The first helpful change of a kind is enough; "" for any number.
        option: The option of `trl-ext plan`: "--allow lora"; "" if the planner chooses it.
        key: The setting of a run: "LoRA (use_peft)"; "" if a run cannot change it.
        opt_in: The opt-in that it adds, or "".
        worth: Speed-up from which it is named when something fits already.
        saves_gib: GiB saved in the phase that ran out of memory, for a run.
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
        """Estimate the run with the change."""
        return self.search.estimate(self.search.job)

    def then(self, other: "Alternative") -> "Alternative":
        """Combine this change with another, which was made on this change's question."""
        return replace(other, option=f"{self.option} {other.option}", key="", opt_in=self.opt_in or other.opt_in)

    def where(self, **settings: Any) -> "Alternative":
        """Return the change with other settings of the run, which are known to go together."""
        return replace(self, search=replace(self.search, job=replace(self.search.job, **settings)))


def alternatives(now: Estimate, phase: str = "", asked_gib: float | None = None) -> list[Alternative]:
    """Return at most three changes of different kinds that save memory in a phase: first changes with which the run
    fits, by the seconds that they cost.

    Args:
        now: The run as it is.
        phase: One of `PHASES`, "" for the phase with the highest peak.
        asked_gib: GiB that could not be allocated; changes that save less are named only if none saves as much.
    """
    before = _need_gib(now, phase)
    found = [replace(one, saves_gib=before - _need_gib(one.estimate, phase)) for one in of_a_run(_search(now))]
    found = [one for one in found if one.saves_gib >= WORTH_GIB]
    enough = [one for one in found if one.saves_gib >= (asked_gib or 0.0)]
    # Of changes that cost no time the allocator's comes first: it is the simplest.
    ranked = sorted(enough or found, key=lambda one: (not one.estimate.fits, max(one.estimate.step_s, now.step_s)))
    first_of_kind: dict[str, Alternative] = {}
    for one in ranked:
        first_of_kind.setdefault(one.kind, one)
    return list(first_of_kind.values())[:NUM_ALTERNATIVES]


def next_stage(now: Estimate) -> Estimate | None:
    """Return the next ZeRO stage and offload that fits with the least memory, else the next; None after the last."""
    search = _search(now)
    least = [
        min(map(search.estimate, most_frugal(search, job)), key=lambda one: one.need_bytes)
        for job in _later_stages(search)
    ]
    return next((one for one in least if one.fits), least[0] if least else None)


def largest_part(size: int) -> int:
    """Return the next smaller micro-batch that keeps the global batch: 9 becomes 3, 5 becomes 1."""
    return max(part for part in range(1, size // 2 + 1) if size % part == 0)


def _search(now: Estimate) -> Search:
    """Return a search that starts from the run and may choose all free settings."""
    return Search(now.job, frozenset(), now.shape, now.hardware)


def _need_gib(estimate: Estimate, phase: str) -> float:
    """GiB reserved at the phase's peak."""
    peak = estimate.worst.get(phase)
    return gib(estimate.need_bytes if peak is None else peak.num_bytes + slack_bytes(peak, estimate.job))


def _later_stages(search: Search) -> list[Job]:
    """Return the job under each later ZeRO stage and offload."""
    place = TECHNIQUES.index((search.job.zero_stage, search.job.offload))
    return [one for one in techniques(search) if TECHNIQUES.index((one.zero_stage, one.offload)) > place]


# The changes --------------------------------------------------------------------------------------------------------


def of_a_run(search: Search) -> Iterator[Alternative]:
    """Yield each single change that a run can have and that does not affect the optimisation; a setting that the run
    has already changes nothing."""
    job = search.job

    def change(kind: str, key: str, **settings: Any) -> Alternative:
        return Alternative(search, kind=kind, key=key).where(**settings)

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
    for every, offloads in checkpointing(search):
        if every == 1:
            key = "gradient_checkpointing=True" + (" activation_offloading=True" if offloads else "")
            key += ", every layer" if job.checkpoint_every > 1 else ""
            yield change("checkpointing", key, checkpoint_every=every, activation_offloading=offloads)
    yield change("vllm", "vllm_enable_sleep_mode=True", vllm_enable_sleep_mode=True)
    for one in fewer_at_once(search, job) if job.generates and not job.use_vllm else ():
        key = f"steps_per_generation={one.steps_per_generation}"
        yield change("generated at once", key, steps_per_generation=one.steps_per_generation)
    for one in _later_stages(search):
        key = launched_with(one) or f"zero_stage={one.zero_stage} offload={one.offload}"
        key += "" if one.dtype == job.dtype else f" dtype={one.dtype}"
        yield change("launch", key, zero_stage=one.zero_stage, offload=one.offload, dtype=one.dtype)


def of_a_question(search: Search, allow: frozenset[str]) -> Iterator[Alternative]:
    """Yield each single change of a question that may make something fit: first changes that do not affect the
    optimisation, then the method, Adam in 8 bits, and more cards."""
    now, given = Alternative(search, allow), sorted(FREE & search.given)
    # Settings that the user gave and the planner could choose: each, then all together.
    for names in [[name] for name in given] + ([given] if len(given) > 1 else []):
        option = " ".join(["without", *(f"--{name}" for name in names)])
        yield replace(now, option=option, search=replace(search, given=search.given.difference(names)))
    yield from _shared_rows(now)
    if search.job.use_vllm:
        without = replace(now, option="without --use_vllm", key="use_vllm=False")
        yield from _asked(without, use_vllm=False, vllm_mode="colocate", vllm_servers=0)
        yield from _other_vllm_mode(now)
    yield from _other_methods(now)
    if search.job.method == "full" and search.may("optim"):
        yield from _allowed(now, "adam8bit")
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
    """Yield the same number of cards of each kind with more memory, the smallest first."""
    for card in sorted(CARDS, key=lambda one: one.total_gib):
        if card.total_gib > search.hardware.card.total_gib and (card.has_bf16 or search.job.fp16):
            larger = replace(search, hardware=replace(search.hardware, card=card))
            yield Alternative(larger, allow, "larger card", f"--gpus {larger.hardware}")


def of_an_answer(search: Search, allow: frozenset[str]) -> Iterator[Alternative]:
    """Yield changes for a question that has an answer: vLLM, a server for it, adapters."""
    now = Alternative(search, allow)
    if search.job.generates and search.may("use_vllm"):
        yield from _asked(replace(now, option="--use_vllm"), use_vllm=True)
    elif search.job.shares_with_vllm and search.may("vllm_mode"):
        yield from _other_vllm_mode(replace(now, worth=WORTH_A_SERVER))
    stage = search.job.zero_stage if not search.may("zero_stage") else 2
    if search.num_gpus > 1 and stage in (1, 2) and search.may("overlap_comm") and not search.job.fsdp:
        overlapping = replace(now, option="--overlap_comm", worth=WORTH_A_BUCKET)
        yield from _asked(overlapping, overlap_comm=True, zero_stage=stage)
    # Adapters are always offered.
    yield from (replace(one, worth=0.0) for one in _other_methods(now) if one.opt_in == "lora")


def _asked(change: Alternative, **settings: Any) -> Iterator[Alternative]:
    """Yield the change with these settings of its question, if they go together."""
    try:
        other = replace(change.search, job=changed(change.search.job, settings))
        other.placed()
    except ConfigError:
        return
    yield replace(change, search=other)


def _allowed(now: Alternative, *names: str) -> Iterator[Alternative]:
    """Yield the named opt-ins that the question lacks."""
    for name in (name for name in names if name not in now.allow):
        kind = "method" if name in ("lora", "qlora") else ""
        yield Alternative(now.search, now.allow | {name}, kind, f"--allow {name}", _KEYS.get(name, ""), name)


def _divides(job: Job, num_gpus: int) -> bool:
    try:
        check_batch(job, num_gpus)
    except ConfigError:
        return False
    return True


def _shared_rows(now: Alternative) -> Iterator[Alternative]:
    """Yield rows shared by more GPUs of a machine."""
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
    """Yield adapters, and adapters on a 4-bit base, also if the user gave another method."""
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
        key = "load_in_4bit=True" if job.method == "lora" else ""
        other = replace(now, kind="method", option=f"--method {name}", key=key)
        yield from _asked(other, **ppo_defaults(job.trainer, name, freed, critic), method=name)
