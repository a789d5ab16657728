"""Plans for a job, best first; refused techniques with their memory; and what one more opt-in would change.

A plan keeps what the user set, the global batch, and everything that changes the optimisation. Only opt-ins in `allow`
let it train adapters (lora), train them on 4 bits (qlora), or keep Adam's state in 8 bits (adam8bit).

Seconds come from `formulas.times`. Of the plans within 15 % of the fastest, the simplest is first: the lowest ZeRO
stage with the least in host memory.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware, parse_gpus, parse_headroom
from trl_ext.memory.formulas.estimate import Estimate, check_precision, estimate
from trl_ext.memory.formulas.generation import vllm_weight_bytes
from trl_ext.memory.job import Job, changed, check_has, check_read
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner import choices
from trl_ext.memory.planner.alternatives import Alternative, of_a_question, of_an_answer, of_larger_cards
from trl_ext.memory.planner.search import (
    Search,
    label,
    make_search,
    opt_ins_of,
    ppo_defaults,
    technique,
)
from trl_ext.memory.units import in_gib

NUM_PLANS = 5
NUM_WAYS_OUT = 5
ADAPTERS = ("lora", "qlora")  # the opt-ins that train adapters
ALIKE = 0.05  # plans that differ by less are equal to a user
CLOCK = 0.15  # error of the formulas of time, as a share of a step's seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings that fit, with their estimate and the opt-ins that they use.

    Args:
        estimate: The settings with their memory and time.
        opt_ins: Names of `allow` for the changes of the optimisation that the settings make.
    """

    estimate: Estimate
    opt_ins: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        return self.estimate.job

    @property
    def label(self) -> str:
        return label(self.job, self.estimate.num_gpus)

    def what_if(self, **changes: Any) -> Estimate:
        """Estimate the plan with other settings; the result need not fit.

        Raises:
            ConfigError: A setting is unknown, has no effect, or cannot work.
        """
        check_has(self.job.trainer, changes)
        job = changed(self.job, changes)
        check_read(job, changes)
        return estimate(job, self.estimate.shape, self.estimate.hardware)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Settings that do not fit.

    Args:
        estimate: The settings with the least memory that the technique needs.
    """

    estimate: Estimate

    @property
    def reason(self) -> str:
        """The technique and its GiB: "ZeRO-2, all weights: 120 GiB at the optimizer step ..."."""
        reason = self.estimate.reason()
        if not reason:
            weights = vllm_weight_bytes(self.estimate.shape, replace(self.estimate.job, vllm_tensor_parallel_size=1))
            reason = f"vLLM's {in_gib(weights)} of weights and its cache do not fit next to training"
        return f"{technique(self.estimate.job, self.estimate.hardware.num_gpus)}: {reason}"


@dataclass(frozen=True, slots=True)
class Plans:
    """The planner's answer.

    Args:
        search: The job, and what could be chosen.
        allow: The user's opt-ins.
        plans: Plans that fit, best first.
        refused: Techniques that do not fit.
    """

    search: Search
    allow: frozenset[str]
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]

    @property
    def reasons(self) -> str:
        """Sentences: why the first technique of each ZeRO stage does not fit."""
        firsts = {one.estimate.job.zero_stage: one for one in reversed(self.refused)}
        return " ".join(f"{firsts[stage].reason.rstrip('.')}." for stage in sorted(firsts))

    def ways_out(self) -> list[tuple[Alternative, Plan]]:
        """Return changes of the question, each with its best plan: if nothing fits the cheapest that make something
        fit, else changes that make steps faster, and adapters."""
        if self.plans:
            best_s = self.plans[0].estimate.step_s
            faster = _answer(of_an_answer(self.search, self.allow))
            return [(change, one) for change, one in faster if one.estimate.step_s * change.worth <= best_s]
        found = _that_may_fit(of_a_question(self.search, self.allow))
        if not found:  # a pair of changes begins with another method: next to more cards it costs least
            methods = [one for one in of_a_question(self.search, self.allow) if one.kind == "method"]
            pairs = (first.then(second) for first in methods for second in of_a_question(first.search, first.allow))
            found = _that_may_fit(one for one in pairs if one.kind != "method")
        answered = list(_answer(found[:NUM_WAYS_OUT]))
        return answered or list(_answer(_that_may_fit(of_larger_cards(self.search, self.allow))))

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences about what other questions would give, each after the option of `trl-ext plan` to add."""
        return tuple(f"{change.option}: {self._gain(plan)}." for change, plan in self.ways_out())

    @property
    def dead_end(self) -> str:
        """A sentence if nothing fits and no advice helps; else ""."""
        if self.plans or self.advice:
            return ""
        whole = "QLoRA holds the whole 4-bit base on each card. " if self.search.job.method == "qlora" else ""
        return f"{whole}No number of cards helps, and no card of the table is large enough."

    @property
    def advice_for_run(self) -> tuple[str, ...]:
        """Sentences about other settings that the run could have, and what they would give."""
        return tuple(f"{change.key}: {self._gain(plan)}." for change, plan in self.ways_out() if change.key)

    def _gain(self, plan: Plan) -> str:
        host = ""
        if self.plans and self.plans[0].estimate.host_bytes > 2 * plan.estimate.host_bytes:
            host = f", {in_gib(plan.estimate.host_bytes)} of host memory instead of "
            host += in_gib(self.plans[0].estimate.host_bytes)
        one, step = plan.estimate, f"{plan.estimate.in_seconds()} s a step"
        if self.plans:
            before = self.plans[0].estimate
            if before.in_seconds() != one.in_seconds():
                step += f" instead of {before.in_seconds()}"
            elif one.step_s < before.step_s:
                step = f"{1 - one.step_s / before.step_s:.0%} less time a step"
        return f"{one.peak_gib:.1f} GiB, about {step}, rough{host}"

    @property
    def best(self) -> Plan:
        """The best plan.

        Raises:
            ConfigError: Nothing fits; the message names what would.
        """
        if not self.plans:
            told = (self.reasons, *self.advice, self.dead_end)
            raise ConfigError(" ".join(["Nothing that keeps the optimisation fits.", *filter(None, told)]))
        return self.plans[0]

    def largest(self, name: str) -> int:
        """Return the largest value of a length or a count with which something fits; 0 if nothing does. Raises
        ConfigError if the setting cannot be searched for, or has no effect."""
        found = self.at_largest(name)
        return getattr(found.job, name) if found else 0

    def at_largest(self, name: str) -> Plan | None:
        """Return the best plan with the largest value of a length or a count; None if nothing fits."""
        found = choices.largest_that(
            self._values(name), lambda value: _any_fits(self.search, {name: value}, self.allow)
        )
        if found is None:
            return None
        job = changed(self.search.job, {name: getattr(found.job, name)})
        plans = plans_of(replace(self.search, job=job, given=self.search.given | {name}), self.allow).plans
        return plans[0] if plans else Plan(found)

    def _values(self, name: str) -> list[int]:
        """Return every value that a length or a count may have, ascending."""
        job, max_positions = self.search.job, self.search.shape.max_positions
        bounds = {
            "max_length": max_positions,
            "max_prompt_length": max_positions - job.max_completion_length,
            "max_completion_length": max_positions - job.max_prompt_length,
            "per_device_train_batch_size": job.global_batch // self.search.num_gpus,
            "lora_r": 1024,
        }
        if name not in bounds:
            raise ConfigError(f"The largest {name} cannot be searched for. Ask for one of {', '.join(bounds)}.")
        check_has(job.trainer, [name])
        check_read(job, [name], may_use_lora=not self.allow.isdisjoint(ADAPTERS))
        values = list(range(1, bounds[name] + 1))
        if name == "per_device_train_batch_size":
            values = [value for value in values if bounds[name] % value == 0]
        return values


def plan(
    trainer: str,
    model: "str | os.PathLike[str] | Mapping[str, Any] | ModelShape",
    gpus: str | Hardware,
    *,
    allow: Iterable[str] = (),
    headroom: str | float | None = None,
    **settings: Any,
) -> Plans:
    """Find settings for a job that fit the cards, by formulas: in under a second, without weights and torch.

    Args:
        trainer: "reward", "grpo" or "ppo".
        model: See `find_shape`.
        gpus: "4xA40-48GB", "2x8xH100-80GB" for two machines, or a `Hardware`.
        allow: Of "lora", "qlora", "adam8bit".
        headroom: Share of a card that stays free, 0.05 or "5%"; None for the hardware's, 5 %.
        settings: Fields of `Job` that stay as given. `gradient_accumulation_steps` fixes the global batch.

    Raises:
        ConfigError: An unknown card, model, setting or opt-in, or settings that contradict each other.
    """
    hardware = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    if headroom is not None:
        hardware = replace(hardware, headroom_frac=parse_headroom(headroom))
    shape, opt_ins = find_shape(model), opt_ins_of(allow)
    search = make_search(trainer, shape, hardware, settings)
    check_read(search.job, search.given, may_use_lora=not opt_ins.isdisjoint(ADAPTERS))
    return plans_of(search, opt_ins)


# The search --------------------------------------------------------------------------------------------------------


def plans_of(search: Search, allow: frozenset[str]) -> Plans:
    """Find all plans and refusals. Raises ConfigError if the card has no bf16, and the job is not in fp16."""
    check_precision(search.job, search.hardware)
    answers = list(_try_techniques(search, allow))
    refused = tuple(one for one in answers if isinstance(one, Refusal))
    return Plans(search, allow, tuple(_best_first(answers)), refused)


def _try_techniques(search: Search, allow: frozenset[str]) -> Iterator[Plan | Refusal]:
    """Yield the fastest plan of each technique, or its refusal. ZeRO-3 with adapters, which gathers the frozen base in
    every micro-batch, is left out unless it is faster than the plans below it."""
    for variant, opt_ins in variants(search, allow):
        below_s = math.inf  # seconds of the fastest below ZeRO-3
        for technique_job in choices.techniques(variant):
            found = choices.fastest(variant, technique_job)
            if found is None:
                yield _refusal(variant, technique_job)
            elif found.job.zero_stage < 3:
                below_s = min(found.step_s, below_s)
                yield Plan(found, opt_ins)
            elif not found.job.uses_lora or found.step_s * (1 + ALIKE) < below_s:
                yield Plan(found, opt_ins)


def _refusal(search: Search, technique_job: Job) -> Refusal:
    """Refuse a technique, with the least memory that it needs."""
    jobs = choices.most_frugal(search, technique_job)
    if search.job.shares_with_vllm:  # only with settings with which vLLM can start, if there are any
        jobs = [job for one in jobs for job in choices.vllm_choices(search, one) or [one]]
    return Refusal(min(map(search.estimate, jobs), key=lambda one: one.need_bytes))


def _best_first(answers: Iterable[Plan | Refusal]) -> list[Plan]:
    """Return the plans that are worth showing: the first as `_choose_first` gives it, the others by their time."""
    plans = [one for one in answers if isinstance(one, Plan)]
    ranked = sorted(plans, key=lambda one: one.estimate.step_s)
    if not ranked:
        return []
    kept = [one for one in ranked if not _is_beaten(one, ranked)]
    if not kept or kept[0].estimate.step_s > ranked[0].estimate.step_s * (1 + ALIKE):
        kept.insert(0, ranked[0])  # the plans that beat it were beaten themselves, by slower ones or in a circle
    first = _choose_first(kept)
    return [first, *(one for one in kept if one is not first)][:NUM_PLANS]


def _choose_first(plans: list[Plan]) -> Plan:
    """Choose the simplest of the fast plans, as far as the clock is precise; if it is tight, a roomier plan that is no
    slower. `plans` are sorted by time."""
    fast = [one for one in plans if one.estimate.step_s <= plans[0].estimate.step_s * (1 + CLOCK)]
    first = min(fast, key=_rank)
    if not first.estimate.is_tight:
        return first
    slowest_s = first.estimate.step_s * (1 + ALIKE)
    roomier = [one for one in fast if not one.estimate.is_tight and one.estimate.step_s <= slowest_s]
    return min(roomier, key=_rank, default=first)


def _rank(found: Plan) -> int:
    """Return the place of a plan's technique among all, the simplest first."""
    return choices.TECHNIQUES.index((found.job.zero_stage, found.job.offload))


def _is_beaten(one: Plan, plans: Iterable[Plan]) -> bool:
    """Return True if one of the plans makes this one useless. No plan beats itself."""
    return any(_beats(other, one) for other in plans)


def _beats(one: Plan, other: Plan) -> bool:
    """Return True if `one` makes `other` useless: `other` is not clearly faster and saves neither GPU nor host memory.
    Of two equal plans the simpler wins: lower stage, less offloading."""
    left, right = one.estimate, other.estimate
    faster = left.step_s <= right.step_s * (1 + ALIKE)
    smaller = left.need_bytes <= right.need_bytes * (1 + ALIKE) and left.host_bytes <= right.host_bytes * (1 + ALIKE)
    if not (faster and smaller):
        return False
    is_alike = right.step_s <= left.step_s * (1 + ALIKE) and right.need_bytes <= left.need_bytes * (1 + ALIKE)
    mine, theirs = ((_rank(own), own.job.activation_offloading, -own.job.checkpoint_every) for own in (one, other))
    return not is_alike or mine < theirs


def variants(search: Search, allow: frozenset[str]) -> Iterator[tuple[Search, tuple[str, ...]]]:
    """Yield the search with each placement of vLLM servers, first with the user's method, then with each opt-in that
    changes method or optimizer."""
    for placed in search.placed():
        job, given = placed.job, placed.given
        yield placed, ()
        # 8-bit Adam cannot run in host memory.
        if "adam8bit" in allow and placed.may("optim") and job.method == "full" and job.offload == "none":
            yield replace(placed, job=replace(job, optim="adamw_bnb_8bit"), given=given | {"offload"}), ("adam8bit",)
        for method in ADAPTERS:
            if method in allow and placed.may("method") and job.method == "full":
                settings = ppo_defaults(job.trainer, method, given, None if placed.may("critic") else job.critic)
                with suppress(ConfigError):  # the method does not go with a stage that the user set
                    yield replace(placed, job=replace(job, method=method, **settings)), (method,)


def _answer(asked: Iterable[Alternative]) -> Iterator[tuple[Alternative, Plan]]:
    """Yield changes with which something fits, each with the best plan that needs it."""
    for change in asked:
        found = _best_first(_try_techniques(change.search, change.allow))
        best = next((one for one in found if change.opt_in in ("", *one.opt_ins)), None)
        if best:
            yield change, best


def _that_may_fit(asked: Iterable[Alternative]) -> list[Alternative]:
    """Return changes with which something fits, by a quick check; of growing numbers of cards only the smallest."""
    found: list[Alternative] = []
    for change in asked:
        if change.kind in ("cards", "larger card", "shared rows") and found and found[-1].kind == change.kind:
            continue
        if _any_fits(change.search, {}, change.allow):
            found.append(change)
    return found


def _any_fits(search: Search, setting: dict[str, int], allow: frozenset[str]) -> Estimate | None:
    """Return the first estimate that fits with this setting and the least memory; None if nothing does."""
    given = search.given | set(setting)
    search = replace(search, job=changed(search.job, setting), given=given)
    frugal = (
        choices.fitted(variant, job)
        for variant, _ in variants(search, allow)
        for technique_job in choices.techniques(variant)
        for job in choices.most_frugal(variant, technique_job)
    )
    return next(filter(None, frugal), None)
