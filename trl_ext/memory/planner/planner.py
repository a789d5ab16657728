"""Plans for a job: best first, what was refused and by which number, and what one word of the user would change.

Contract: a plan keeps what the user set, the global batch and everything else that the optimisation sees. Only a word
in `allow` lets it train adapters (lora), train them on 4 bits (qlora), keep Adam's state in 8 bits (adam8bit), shorten
sequences (shorter) or generate fewer completions a prompt (fewer).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware, parse_gpus
from trl_ext.memory.estimate import Estimate, estimate
from trl_ext.memory.job import Job, changed
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner import ladder
from trl_ext.memory.planner.ladder import Search
from trl_ext.memory.planner.question import make_search, ppo_defaults, unalias, unaliased, words_of
from trl_ext.memory.planner.words import describe, technique, vllm_reason

NUM_PLANS = 5
WORTH_A_WORD = 2.0  # an opt-in is mentioned beside plans that fit if it is so many times faster
SHORTEST = 64  # tokens
ALIKE = 0.05  # plans that differ by less are the same to a user


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings that fit.

    Args:
        estimate: What they need.
        opt_ins: Words of `allow` that it uses.
    """

    estimate: Estimate
    opt_ins: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        return self.estimate.job

    @property
    def label(self) -> str:
        return describe(self.job, self.estimate.case.hardware.num_gpus)

    def what_if(self, **changes: Any) -> Estimate:
        """The estimate with other settings, everything else as planned; it need not fit.

        Raises:
            ConfigError: An unknown setting, or settings that cannot work.
        """
        case = self.estimate.case
        return estimate(changed(self.job, unaliased(changes)), case.shape, case.hardware)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Settings that do not fit, at their most frugal, and the number that says so."""

    estimate: Estimate

    @property
    def reason(self) -> str:
        return f"{technique(self.estimate.job)}: {self.estimate.reason() or vllm_reason(self.estimate)}"


@dataclass(frozen=True, slots=True)
class Plans:
    """The planner's answer.

    Args:
        search: What was asked.
        allow: Words that the user gave.
        plans: Those that fit, fastest first.
        refused: Techniques that do not fit.
        advice: Sentences: which single word would change what.
    """

    search: Search
    allow: frozenset[str]
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]
    advice: tuple[str, ...] = ()

    @property
    def best(self) -> Plan:
        """The fastest plan.

        Raises:
            ConfigError: Nothing fits; with what would.
        """
        if not self.plans:
            numbers = " ".join(f"{refusal.reason}." for refusal in self.refused[:3])
            raise ConfigError(" ".join(["Nothing that keeps the optimisation fits.", numbers, *self.advice]))
        return self.plans[0]

    def largest(self, field: str) -> int:
        """The largest value of a length or a count with which something fits, 0 if nothing does.

        Raises:
            ConfigError: The setting is none of those that grow.
        """
        return largest(self.search, field, self.allow)


def plan(
    trainer: str,
    model: "str | os.PathLike[str] | Mapping[str, Any] | ModelShape",
    gpus: str | Hardware,
    *,
    allow: Iterable[str] = (),
    **settings: Any,
) -> Plans:
    """Settings for a job that fit the cards, by formulas: in under a second, without weights and without torch.

    Args:
        trainer: "reward", "grpo" or "ppo".
        model: See `find_shape`.
        gpus: "4xA40-48GB", or a `Hardware`.
        allow: Of "lora", "qlora", "adam8bit", "shorter", "fewer".
        settings: Fields of `Job`; they stay as they are. `gradient_accumulation_steps` fixes the global batch.

    Raises:
        ConfigError: An unknown card, model, setting or word, or settings that contradict each other.
    """
    hardware = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    shape, words = find_shape(model), words_of(allow)
    search = make_search(trainer, shape, hardware, settings)
    return plans_of(search, words)


# The search --------------------------------------------------------------------------------------------------------


def plans_of(search: Search, allow: frozenset[str]) -> Plans:
    """Plans, refusals and advice."""
    plans, refused = _plans_and_refusals(search, allow)
    return Plans(search, allow, plans, refused, tuple(_advice(search, allow, plans)))


def _plans_and_refusals(search: Search, allow: frozenset[str]) -> tuple[tuple[Plan, ...], tuple[Refusal, ...]]:
    plans: list[Plan] = []
    refused: list[Refusal] = []
    for variant, opt_ins in variants(search, allow):
        fits_whole = False
        for technique_job in ladder.techniques(variant):
            if technique_job.uses_lora and technique_job.zero_stage == 3 and fits_whole:
                continue  # it would gather the frozen base in every micro-batch, and all of it to merge adapters
            found = ladder.fitting(variant, technique_job)
            if found:
                plans.append(Plan(min(found, key=lambda one: one.step_s), opt_ins))
                fits_whole = True
            else:
                refused.append(Refusal(_least(variant, technique_job)))
    if not plans and allow & {"shorter", "fewer"}:
        plans = list(_smaller(search, allow))
    plans.sort(key=lambda one: one.estimate.step_s)
    worthwhile = [one for one in plans if not any(_beats(other, one) for other in plans if other is not one)]
    return tuple(worthwhile[:NUM_PLANS]), tuple(refused)


def _beats(one: Plan, other: Plan) -> bool:
    """Whether nobody would take the other: it is not clearly faster and saves neither GPU nor host memory. Of two
    that are alike the simpler one stands, which has the lower stage and offloads less."""
    left, right = one.estimate, other.estimate
    faster = left.step_s <= right.step_s * (1 + ALIKE)
    smaller = left.need_bytes <= right.need_bytes * (1 + ALIKE) and left.host_bytes <= right.host_bytes * (1 + ALIKE)
    if not (faster and smaller):
        return False
    is_alike = right.step_s <= left.step_s * (1 + ALIKE) and right.need_bytes <= left.need_bytes * (1 + ALIKE)
    return not is_alike or _complexity(one.job) < _complexity(other.job)


def _complexity(job: Job) -> tuple[int, bool, int]:
    return ladder.TECHNIQUES.index((job.zero_stage, job.offload)), job.activation_offloading, -job.checkpoint_every


def _least(search: Search, technique_job: Job) -> Estimate:
    """A technique's most frugal estimate."""
    jobs = ladder.most_frugal(search, technique_job)
    jobs = [choice for job in jobs for choice in (_vllm_or_itself(search, job))]
    return min(map(search.estimate, jobs), key=lambda one: one.need_bytes)


def _vllm_or_itself(search: Search, job: Job) -> list[Job]:
    return list(ladder.vllm_choices(search, job)) or [job] if job.use_vllm else [job]


def variants(search: Search, allow: frozenset[str]) -> Iterator[tuple[Search, tuple[str, ...]]]:
    """The user's own method, then what he allows."""
    yield search, ()
    if "adam8bit" in allow and search.may("optim") and search.job.method == "full":
        job = replace(search.job, optim="adamw_bnb_8bit")
        given = search.given | {"offload"}  # 8-bit Adam has no version for host memory
        yield replace(search, job=job, given=given), ("adam8bit",)
    for method in ("lora", "qlora"):
        if method in allow and search.may("method") and search.job.method == "full":
            settings = ppo_defaults(search.job.trainer, method, search.given)
            try:
                job = replace(search.job, method=method, **settings)
            except ConfigError:
                continue  # it does not go with a stage that the user set
            yield replace(search, job=job), (method,)


def _smaller(search: Search, allow: frozenset[str]) -> Iterator[Plan]:
    """Halve lengths, or completions a prompt, until something fits."""
    lengths = ("max_completion_length", "max_prompt_length") if search.job.generates else ("max_length",)
    names = [*(lengths if "shorter" in allow else ()), *(("num_generations",) if "fewer" in allow else ())]
    words = tuple(sorted(allow & {"shorter", "fewer"}))
    job = search.job
    while True:
        halved = {name: getattr(job, name) // 2 for name in names if getattr(job, name) // 2 >= _least_value(name)}
        if not halved:
            return
        job = changed(job, halved)
        smaller = replace(search, job=job)
        plans, _ = _plans_and_refusals(smaller, allow - {"shorter", "fewer"})
        if plans:
            yield from (replace(one, opt_ins=(*one.opt_ins, *words)) for one in plans)
            return


def _least_value(name: str) -> int:
    return 2 if name == "num_generations" else SHORTEST


def _advice(search: Search, allow: frozenset[str], plans: tuple[Plan, ...]) -> Iterator[str]:
    """What one more word would give: every word if nothing fits, else LoRA if it is much faster."""
    words = [word for word in ("lora", "qlora", "adam8bit", "shorter") if word not in allow]
    for word in words if not plans else [word for word in words if word == "lora"]:
        if word in ("lora", "qlora", "adam8bit") and search.job.method != "full":
            continue
        better, _ = _plans_and_refusals(search, allow | {word})
        better = tuple(one for one in better if word in one.opt_ins)
        if better and (not plans or better[0].estimate.step_s * WORTH_A_WORD < plans[0].estimate.step_s):
            best = better[0].estimate
            yield f"--allow {word}: {best.peak_gib:.1f} GiB, about {best.step_s:.0f} s a step{_lengths(word, best)}."


def _lengths(word: str, best: Estimate) -> str:
    return f", {best.job.sequence_tokens} tokens a sequence" if word == "shorter" else ""


def largest(search: Search, field: str, allow: frozenset[str] = frozenset()) -> int:
    """The largest value of a setting with which something fits, by bisection on the formulas."""
    bounds = {
        "max_length": search.shape.max_positions,
        "max_prompt_length": search.shape.max_positions - search.job.max_completion_length,
        "max_completion_length": search.shape.max_positions - search.job.max_prompt_length,
        "per_device_train_batch_size": search.job.global_batch // search.hardware.num_gpus,
        "lora_r": 1024,
    }
    field = unalias(field)
    if field not in bounds:
        raise ConfigError(f"The largest {field} cannot be searched for. Ask for one of {', '.join(bounds)}.")
    values = list(range(1, bounds[field] + 1))
    if field == "per_device_train_batch_size":
        values = [value for value in values if bounds[field] % value == 0]
    best = ladder.largest_that(values, lambda value: _any_fits(search, {field: value}, allow))
    return getattr(best.job, field) if best else 0


def _any_fits(search: Search, setting: dict[str, int], allow: frozenset[str]) -> Estimate | None:
    given = search.given | set(setting)
    search = replace(search, job=changed(search.job, setting), given=given)
    frugal = (
        ladder.fitted(variant, job)
        for variant, _ in variants(search, allow)
        for technique_job in ladder.techniques(variant)
        for job in ladder.most_frugal(variant, technique_job)
    )
    return next(filter(None, frugal), None)
