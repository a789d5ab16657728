"""The error that ends a run that is out of memory: where it happened, the memory used, and settings that would fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from transformers.utils import logging

from trl_ext.errors import ConfigError, OutOfMemoryError
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.options import LAYERS, OPTIONS
from trl_ext.memory.planner.alternatives import alternatives, largest_part, next_stage
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import gib, in_gib
from trl_ext.trainers.fit.plan import plan_of
from trl_ext.trainers.fit.trainer import FittedTrainer
from trl_ext.trainers.step.out_of_memory import BACKWARD, FORWARD, Place, asked_gib, is_out_of_memory, place_of

logger = logging.get_logger(__name__)
# Formulas' bytes are at most so many times too low; and a share of an update's seconds that is worth a sentence.
FORMULA_ERROR, WORTH_SAYING = 1.1, 0.02
GENERAL = {
    "generate": "a smaller steps_per_generation, a shorter max_completion_length, or use_vllm with sleep mode",
    "step": "ZeRO-2 (--config_file zero2), its optimizer in host memory (zero2_offload), or LoRA (use_peft)",
    "": "a smaller per_device_train_batch_size with more gradient_accumulation_steps, gradient_checkpointing=True, or "
    "ZeRO (--config_file zero2, then zero2_offload or zero3)",
}


def explained(error: BaseException, trainer: FittedTrainer) -> OutOfMemoryError:
    """Return the error for the user; `error` is the allocator's, to be kept as the cause."""
    place = place_of(error)
    plan, accelerator, loop = _plan(trainer), trainer.accelerator, trainer.forward_loop
    where = f"step {trainer.state.global_step + 1}"
    if accelerator.num_processes > 1:
        where += f", rank {accelerator.process_index}"
    if loop.last is not None and place in (FORWARD, BACKWARD):
        rows, tokens = loop.last.num_rows, loop.last.num_tokens
        where += f", 1 row of {tokens:,} tokens" if rows == 1 else f", {rows} rows of {tokens:,} tokens together"
    why_whole = place.why_whole if place is not FORWARD else _why_forward_stays_whole(loop)
    try:
        hints = _general(place) if plan is None else _planned(plan, place, asked_gib(str(error)))
    except ConfigError:  # the formulas do not support settings of this run
        hints = _general(place)
    opening = f"Out of memory {place.words}: {where}."
    told = " ".join(str(error).partition(" If reserved")[0].split())  # without PyTorch's advice
    sentences = [opening, told, f"It could not be split: {why_whole}.", *hints]
    return OutOfMemoryError(" ".join(filter(None, sentences)))


@contextmanager
def out_of_memory_in_words(trainer: FittedTrainer | None = None) -> Iterator[None]:
    """Explain out-of-memory errors inside the block: while a trainer trains or, without a trainer, a model loads."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if trainer is not None:
            raise explained(error, trainer) from error
        place = place_of(error)
        raise OutOfMemoryError(f"Out of memory {place.words}: {error} {_general(place)[0]}") from error


def _plan(trainer: FittedTrainer) -> Plan | None:
    try:
        return plan_of(trainer)
    except Exception:  # whatever went wrong, the out-of-memory error is the important one to report
        logger.warning("Settings that would fit are unknown.", exc_info=True)
        return None


def _why_forward_stays_whole(loop: Any) -> str:
    if loop.halving.why_not:
        return str(loop.halving.why_not)
    if loop.last is None:
        return "batches of your own data_collator are not cut"
    if loop.last.num_rows < 2:
        return "one row is left"
    return "during the model's own forward the ranks cannot agree on it"


def _planned(plan: Plan, place: Place, asked: float | None) -> list[str]:
    changes = "; ".join(
        f"({i}) {one.key}: {one.saves_gib:.1f} GiB less there, {gib(one.estimate.need_bytes):.1f} in all"
        for i, one in enumerate(alternatives(plan.estimate, place.phase, asked), 1)
    )
    later = next_stage(plan.estimate)
    usable = f"a card with {plan.estimate.hardware.usable}"
    stage = "No ZeRO stage or offload is left: use LoRA, or more cards."
    if later is not None:
        stage = f"The next ZeRO stage or offload: {Plan(later).label}: {in_gib(later.need_bytes)}."
    first = f"What fits first, the cheapest of it, with the same optimisation, estimated for {usable}: {changes}."
    return [first if changes else "", stage]


def cheapest_change(trainer: FittedTrainer) -> str:
    """Return the end of a sentence: the cheapest change that saves memory, and what the run would then need."""
    plan = _plan(trainer)
    try:
        found = alternatives(plan.estimate)[:1] if plan else []
    except ConfigError:  # the formulas do not support settings of this run
        found = []
    for one in found:
        return f"set {one.key} ({gib(one.estimate.need_bytes):.1f} GiB by the plan); the optimisation stays the same."
    size, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    if size > 1:
        part = largest_part(size)
        smaller = f"per_device_train_batch_size={part} gradient_accumulation_steps={steps * size // part}"
        return f"set {smaller}; the optimisation stays the same."
    return f"try {GENERAL['']}."


def faster_checkpointing(trainer: FittedTrainer, room_bytes: float) -> str:
    """Return a sentence with the fastest checkpointing that takes at most so many more bytes; "" if none is faster.

    A run with `memory` has what its plan chose. Bytes and seconds are estimated.
    """
    is_open = trainer.args.gradient_checkpointing and getattr(trainer.args, "memory_plan", None) is None
    plan = _plan(trainer) if is_open else None
    if plan is None:
        return ""
    now = best = plan.estimate
    best_more = 0.0
    of_layers = [option.name for option in OPTIONS if option.block == LAYERS]
    for every, *are_on in product((4, 2, 1), *[(True, False)] * len(of_layers)):
        switched: dict[str, Any] = dict(zip(of_layers, are_on, strict=True))
        try:
            job = replace(now.job, checkpoint_every=every, **switched)
            one = estimate(job, now.shape, now.hardware)
        except ConfigError:  # a setting of this run that contradicts it
            continue
        more = one.worst["update"].num_bytes - now.worst["update"].num_bytes
        if more * FORMULA_ERROR <= room_bytes and one.seconds["update"] < best.seconds["update"]:
            best, best_more = one, more
    saved = 1 - best.seconds["update"] / now.seconds["update"]
    if saved < WORTH_SAYING:
        return ""
    keys = [f"{name}: true" for name in of_layers if getattr(best.job, name)]
    keys += [f"every_n_layers: {best.job.checkpoint_every}"] * (best.job.checkpoint_every > 1)
    return (
        f"gradient_checkpointing_kwargs: {{{', '.join(keys)}}} would make updates {saved:.0%} shorter and take "
        f"{in_gib(best_more)} more of this card (estimated)"
    )


def _general(place: Place) -> list[str]:
    hint = GENERAL.get(place.phase, GENERAL[""])
    return [f"Try {hint}. `trl-ext check RECIPE` shows what would fit, the cheapest change first."]
