"""Alternatives to a run, or to a question of the planner, that does not fit.

Of a run: single changes that the optimisation does not see, cheapest first, and the next ZeRO stage or offload. All
GiB are estimated, by the planner's formulas: the difference that a setting makes is told as such, for the estimate of
the run itself may be what was wrong. Of a question: the same over all settings, in the order of what they cost the
user; the planner answers it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, Hardware
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
    """The cheapest changes that save memory in a phase: those with which the run fits, by the seconds that they cost;
    at most three, of different kinds.

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
    # Of changes that cost no time the simplest stands first, the allocator's.
    ranked = sorted(enough or found, key=lambda one: (not one.fits, max(one.estimate.step_s, now.step_s)))
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


def _changes(search: Search) -> Iterator[tuple[str, str, Job]]:
    """Every single change that the optimisation does not see: its kind, how it is written, and the job then."""
    job = search.job
    if not job.expandable_segments:
        written = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        yield "allocator", written, replace(job, expandable_segments=True)
    size = job.per_device_train_batch_size
    if size > 1:
        part = largest_part(size)
        smaller = replace(job, per_device_train_batch_size=part)
        steps = smaller.accumulation(search.num_gpus)
        yield "batch", f"per_device_train_batch_size={part} gradient_accumulation_steps={steps}", smaller
    budget = 2 * job.sequence_tokens  # one pair
    if not job.generates and job.packing and job.row_tokens > budget:
        yield "budget", f"max_tokens_per_forward={budget}", replace(job, max_tokens_per_forward=budget)
    for one in shared_rows(search):
        yield "shared rows", f"sequence_parallel={one.sequence_parallel}", one
    for every, offloads in CHECKPOINTING[CHECKPOINTING.index((1, False)) :]:
        if not (offloads and job.generates):
            written = "gradient_checkpointing=True" + (" activation_offloading=True" if offloads else "")
            written += ", every layer" if job.checkpoint_every > 1 else ""
            yield "checkpointing", written, replace(job, checkpoint_every=every, activation_offloading=offloads)
    if job.shares_with_vllm:
        if not job.vllm_enable_sleep_mode:
            yield "vllm", "vllm_enable_sleep_mode=True", replace(job, vllm_enable_sleep_mode=True)
    elif job.generates and not job.use_vllm:
        for one in fewer_at_once(search, job):
            yield "generated at once", f"steps_per_generation={one.steps_per_generation}", one
    for one in _later_stages(search):
        written = launched_with(one) or f"zero_stage={one.zero_stage} offload={one.offload}"
        yield "launch", written if one.dtype == job.dtype else f"{written} dtype={one.dtype}", one


def shared_rows(search: Search) -> Iterator[Job]:
    """The job with rows that more GPUs of a machine share."""
    job, here = search.job, search.hardware.gpus_per_machine
    if not job.packing or job.fsdp or search.shape.experts is not None:
        return
    for size in range(job.sequence_parallel + 1, here + 1):
        one = replace(job, sequence_parallel=size)
        try:
            check_batch(one, search.hardware.num_gpus)
        except ConfigError:
            continue
        if here % size == 0:
            yield one


def _later_stages(search: Search) -> list[Job]:
    """The job under every ZeRO stage and offload that comes after its own."""
    here = (search.job.zero_stage, search.job.offload)
    place = TECHNIQUES.index(here) if here in TECHNIQUES else len(TECHNIQUES)
    return [one for one in techniques(search) if TECHNIQUES.index((one.zero_stage, one.offload)) > place]


# Other questions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WayOut:
    """One setting of the planner's question, changed.

    Args:
        option: As `trl-ext plan` takes it: "--allow lora".
        search, allow: The question then.
        key: As a run takes it: "memory_allow=lora"; "" for what a run cannot change.
        opt_in: The opt-in that it gives, "" for another setting.
        kind: "method" if it trains other weights, "cards" for more of them, "larger card" for others, "shared rows"
            for more cards a row, "" else.
        worth: How many times faster it must be to be mentioned beside plans that fit.
    """

    option: str
    search: Search
    allow: frozenset[str]
    key: str = ""
    opt_in: str = ""
    kind: str = ""
    worth: float = 1.0

    def then(self, other: "WayOut") -> "WayOut":
        """This change and another one of the question that it leaves."""
        return replace(other, option=f"{self.option} {other.option}", key="", opt_in=self.opt_in or other.opt_in)


def other_questions(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """Every single change of a question that may make something fit: first what the optimisation does not see, then
    the method, Adam in 8 bits, less at once, and more cards."""
    # Settings that are the planner's to choose, and that the user gave: each, and all of them.
    given = sorted(FREE & search.given)
    for names in [[name] for name in given] + ([given] if len(given) > 1 else []):
        option = " ".join(["without", *(f"--{name}" for name in names)])
        yield WayOut(option, replace(search, given=search.given.difference(names)), allow)
    for one in shared_rows(search):
        option, key = (f"{before}{one.sequence_parallel}" for before in ("--sequence_parallel ", "sequence_parallel="))
        yield WayOut(option, replace(search, job=one), allow, key, kind="shared rows")
    yield from _other_vllm(search, allow)
    yield from _other_methods(search, allow)
    if search.job.method == "full" and search.may("optim") and "adam8bit" not in allow:
        yield _allowed(search, allow, "adam8bit")
    for name in ("shorter", "fewer") if search.job.trainer == "grpo" else ("shorter",):
        if name not in allow:
            yield _allowed(search, allow, name)
    yield from _more_cards(search, allow)


def faster_ways(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """Changes of a question that has an answer: vLLM where there is none, a server for it, adapters."""
    if search.job.generates and search.may("use_vllm"):
        yield from _changed(search, allow, "--use_vllm", "", use_vllm=True)
    elif search.job.shares_with_vllm and search.may("vllm_mode"):
        yield from (replace(one, worth=WORTH_A_SERVER) for one in _other_vllm(search, allow) if "server" in one.option)
    stage = search.job.zero_stage if not search.may("zero_stage") else 2
    if search.num_gpus > 1 and stage in (1, 2) and search.may("overlap_comm") and not search.job.fsdp:
        for one in _changed(search, allow, "--overlap_comm", "", overlap_comm=True, zero_stage=stage):
            yield replace(one, worth=WORTH_A_BUCKET)
    for one in _other_methods(search, allow):
        if one.opt_in == "lora":
            yield replace(one, worth=0.0)  # a question that is always asked


def _other_vllm(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """No vLLM, or the other of its two modes."""
    job = search.job
    if not job.use_vllm:
        return
    none = {"use_vllm": False, "vllm_mode": "colocate", "vllm_servers": 0}
    yield from _changed(search, allow, "without --use_vllm", "use_vllm=False", **none)
    given = search.given - OF_SERVERS
    free = replace(search, given=given)
    if job.vllm_mode == "server":
        yield from _changed(free, allow, "--vllm_mode colocate", "", vllm_mode="colocate", vllm_servers=0)
    elif search.hardware.num_machines == 1:
        yield from _changed(free, allow, "--vllm_mode server", "", vllm_mode="server")


def _other_methods(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """Adapters, and adapters on a 4-bit base, also if the user gave another method."""
    job = search.job
    for name in ("lora", "qlora")[("full", "lora", "qlora").index(job.method) :]:
        if name in allow:
            continue
        if job.method == "full" and search.may("method"):
            yield _allowed(search, allow, name)
            continue
        is_freed = job.method == "full" and job.critic != "none"
        freed = search.given - {"critic", "reward_model"} if is_freed else search.given
        critic = job.critic if "critic" in freed else None
        settings = {**ppo_defaults(job.trainer, name, freed, critic), "method": name}
        key = "load_in_4bit=True" if job.method == "lora" else ""
        for one in _changed(search, allow, f"--method {name}", key, **settings):
            yield replace(one, kind="method")


def _allowed(search: Search, allow: frozenset[str], name: str) -> WayOut:
    kind = "method" if name in ("lora", "qlora") else ""
    return WayOut(f"--allow {name}", search, allow | {name}, f"memory_allow={name}", name, kind)


def _more_cards(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """Twice, four and eight times the cards: in one machine up to eight, then more machines."""
    now = search.hardware
    for times in (2, 4, 8):
        each = min(now.gpus_per_machine * times, max(LARGEST_MACHINE, now.gpus_per_machine))
        count = now.num_gpus * times
        if count % each:
            continue
        hardware: Hardware = replace(now, num_gpus=count, num_machines=count // each)
        try:
            check_batch(search.job, count)
        except ConfigError:
            return
        yield WayOut(f"--gpus {hardware}", replace(search, hardware=hardware), allow, kind="cards")


def larger_cards(search: Search, allow: frozenset[str]) -> Iterator[WayOut]:
    """As many cards of each kind with more memory, the smallest first."""
    now = search.hardware
    for card in sorted(CARDS, key=lambda one: one.total_gib):
        if card.total_gib > now.card.total_gib and (card.has_bf16 or search.job.fp16):
            hardware = replace(now, card=card)
            yield WayOut(f"--gpus {hardware}", replace(search, hardware=hardware), allow, kind="larger card")


def _changed(search: Search, allow: frozenset[str], option: str, key: str, **settings: object) -> Iterator[WayOut]:
    """The question with other settings, if they go together."""
    try:
        other = replace(search, job=changed(search.job, settings))
        other.placed()
    except ConfigError:
        return
    yield WayOut(option, other, allow, key)
