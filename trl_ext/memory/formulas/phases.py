"""From states and activations to the memory of one GPU, phase by phase and term by term.

A phase holds several moments whose terms differ (the backward of the top layer holds all checkpoints, that of the
bottom layer all gradients); its peak is its worst moment. All byte counts are estimates from formulas.
"""

from collections.abc import Iterator

from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas import activations as act
from trl_ext.memory.formulas import engines as roles
from trl_ext.memory.formulas import generation, states
from trl_ext.memory.formulas.case import Case, Moment, Terms, plus
from trl_ext.memory.formulas.engines import Part
from trl_ext.memory.formulas.passes import gathered, gradients_of_others, layer_forward, update_moments
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import lm_params
from trl_ext.memory.units import GIB

__all__ = ["PHASES", "PHASE_WORDS", "Case", "Moment", "moments", "plus", "resident", "slack_bytes", "usable_bytes"]

PHASES = ("generate", "score", "update", "step", "weight_push")
PHASE_WORDS = {
    "generate": "while generating",
    "score": "while scoring",
    "update": "in forward and backward",
    "step": "at the optimizer step",
    "weight_push": "while weights go to vLLM",
}


def moments(case: Case) -> Iterator[Moment]:
    """Every point where memory may peak, in the order of a step."""
    base = resident(case)
    if case.job.generates:
        yield from _generate(case, base)
        yield from _score(case, base)
    yield from update_moments(case, base)
    yield from _step(case, base)
    if case.job.use_vllm:
        yield _weight_push(case, base)


def resident(case: Case) -> Terms:
    """There in every phase, from the second optimizer step on: Adam's state appears in the first."""
    job, num_gpus = case.job, case.num_gpus
    terms: Terms = {}
    for part in case.parts:
        engine, own = part.engine, part.job
        weights = states.trained_bytes(engine, own, num_gpus) + states.frozen_bytes(engine, own, num_gpus)
        terms[f"{engine.role} weights"] = weights
        terms = plus(terms, {"optimizer": states.optimizer_bytes(engine, own, num_gpus)})
        if job.zero_stage in (0, 3):
            terms = plus(terms, {"buckets": states.bucket_bytes(engine, own, num_gpus)})
        if job.zero_stage == 3:
            terms = plus(terms, {"gradients": states.gradient_bytes(engine, own, num_gpus)})
    for copy in case.copies:
        terms[f"{copy.role} weights"] = copy.bytes_per_gpu(job, num_gpus)
    if job.use_vllm:
        terms["vLLM"] = (
            generation.RESIDUE_BYTES if job.vllm_enable_sleep_mode else generation.vllm_bytes(case.hardware.card, job)
        )
    return terms


def _generate(case: Case, base: Terms) -> Iterator[Moment]:
    shape, job, num_gpus = case.shape, case.job, case.num_gpus
    if job.use_vllm:
        yield Moment("generate", "vLLM at work", {**base, "vLLM": generation.vllm_bytes(case.hardware.card, job)})
        return
    whole = _gathered_to_generate(case)
    cache = generation.cache_bytes(shape, job, num_gpus)
    prompt_share = job.max_prompt_length / job.sequence_tokens
    prompts = job.generated_at_once(num_gpus) * job.max_prompt_length
    prefill = {"KV cache": cache * prompt_share, "layer work": prompts * act.no_grad_bytes(shape, job)}
    decode = {"KV cache": cache, "head": generation.sampling_bytes(shape, job, num_gpus)}
    yield Moment("generate", "reading the prompts", plus(base, prefill, whole))
    yield Moment("generate", "the last token of all completions", plus(base, decode, whole))


def _gathered_to_generate(case: Case) -> Terms:
    if case.job.zero_stage == 3 and case.job.ds3_gather_for_generation:
        return {"gathered weights": 2.0 * lm_params(case.shape)}
    places = [states.gathered_bytes(case.shape, case.job, True, place) for place in ("forward", "embedding")]
    return gathered(max(places))


# Scoring ----------------------------------------------------------------------------------------------------------


def _score(case: Case, base: Terms) -> Iterator[Moment]:
    """Forwards without gradients. Under autocast the policy's own leave bf16 copies of its weights until they end."""
    shape, job, part = case.shape, case.job, case.parts[0]
    yield Moment("score", "a layer's forward", plus(base, layer_forward(case, part)))
    whole = gathered(states.gathered_bytes(shape, job, part.has_head, "embedding"))
    yield Moment(
        "score",
        "forward of the embedding",
        plus(base, whole, {"layer work": 13.0 * shape.hidden * job.forward_tokens}),
    )
    if not roles.num_scoring_passes(job):
        return
    num_scored = min(job.scored_tokens, job.forward_tokens)
    head = act.head_forward_bytes(shape, job, num_scored) + job.forward_tokens * 8 * shape.hidden
    casts = {"cast weights": act.cast_cache_bytes(shape, job)}
    whole = gathered(states.gathered_bytes(shape, job, part.has_head, "forward"))
    yield Moment("score", "the head's forward", plus(base, {"head": head}, casts, whole))


# The optimizer step -----------------------------------------------------------------------------------------------


def _step(case: Case, base: Terms) -> Iterator[Moment]:
    for part in case.parts:
        others = gradients_of_others(case, part) if case.job.zero_stage else {}
        own = {"step copies": states.step_bytes(case.shape, part.engine, part.job, case.num_gpus, part.has_head)}
        own["gradients"] = _gradients_to_step(case, part)
        yield Moment("step", "the optimizer step", plus(base, others, own, _embedding_output(case, part)))


def _gradients_to_step(case: Case, part: Part) -> float:
    """DeepSpeed's own share; without it, all gradients of all engines."""
    if case.job.zero_stage == 0:
        return sum(states.gradient_bytes(one.engine, one.job, case.num_gpus) for one in case.parts)
    if case.job.zero_stage == 3:
        return 0.0
    return states.share_gradient_bytes(case.shape, part.engine, part.job, case.num_gpus, part.has_head)


def _embedding_output(case: Case, part: Part) -> Terms:
    """With adapters and checkpointing transformers lets the embedding's output require gradients, so that it is there
    with its own until the next forward: 4H a token."""
    job = part.job
    if not job.uses_lora or not job.checkpoint_every:
        return {}
    return {"layer work": 4.0 * case.shape.hidden * job.forward_tokens}


def _weight_push(case: Case, base: Terms) -> Moment:
    """vLLM's weights are awake. ZeRO-3 gathers one weight after the other, but all of them at once to merge LoRA."""
    shape, job = case.shape, case.job
    largest = 2.0 * shape.vocab * shape.hidden
    if job.zero_stage == 3:
        pushed = 2.0 * lm_params(shape) if job.uses_lora else largest
    else:
        pushed = largest if job.uses_lora else 0.0
    awake = generation.vllm_weight_bytes(shape, job) + generation.RESIDUE_BYTES
    vllm = awake if job.vllm_enable_sleep_mode else base["vLLM"]
    return Moment("weight_push", "weights on their way", plus({**base, "vLLM": vllm}, {"gathered weights": pushed}))


def slack_share(job: Job) -> float:
    """What the allocator reserves beyond what is allocated, as a share, with native segments or expandable ones.

    The most that replays of 14 runs of an 8B model through a replica of it gave, rounded up (`twin.allocator`; not yet
    measured on a card). ZeRO-3 gave 2 to 14 and 0 to 12.5 %, but has a stream more than the replica.
    """
    native, expandable = _slack_shares(job)
    return expandable if job.expandable_segments else native


def _slack_shares(job: Job) -> tuple[float, float]:
    if job.zero_stage == 3:
        return 0.21, 0.13 if job.uses_lora else 0.11
    if job.uses_lora:
        return 0.05, 0.03
    return (0.20, 0.08) if job.zero_stage else (0.17, 0.06)


def slack_bytes(moment: Moment, job: Job) -> float:
    """Fragmentation at a moment; vLLM's share is its own allocator's."""
    return slack_share(job) * (moment.num_bytes - moment.terms.get("vLLM", 0.0))


def usable_bytes(hardware: Hardware) -> float:
    """What a card has for tensors."""
    return hardware.card.usable_gib * GIB
