"""From states and activations to the memory of one GPU, phase by phase and term by term.

A phase holds several moments whose terms differ (the backward of the top layer holds all checkpoints, that of the
bottom layer all gradients); its peak is its worst moment. All byte counts are estimates from formulas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trl_ext.memory import activations as act
from trl_ext.memory import generation, roles, states
from trl_ext.memory.cards import Hardware
from trl_ext.memory.job import Job
from trl_ext.memory.shapes import ModelShape, embedding_params, lm_params
from trl_ext.memory.units import GIB

PHASES = ("generate", "score", "update", "step", "weight_push")
PHASE_WORDS = {
    "generate": "while generating",
    "score": "while scoring",
    "update": "in forward and backward",
    "step": "at the optimizer step",
    "weight_push": "while weights go to vLLM",
}
OFFLOAD_STASH = 5  # checkpoints that TRL's activation offloading keeps on the card, on their way
Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a step where memory may peak.

    Args:
        phase: One of PHASES.
        what: For the reader: "backward of the top layer".
        terms: Bytes by term; they add up.
    """

    phase: str
    what: str
    terms: Terms

    @property
    def num_bytes(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Case:
    """What the formulas look at: model, job and machine, and which models the run therefore holds."""

    shape: ModelShape
    job: Job
    hardware: Hardware
    engines: Sequence[states.Engine]
    copies: Sequence[roles.FrozenCopy]

    @classmethod
    def of(cls, shape: ModelShape, job: Job, hardware: Hardware) -> "Case":
        return cls(shape, job, hardware, roles.engines(shape, job), roles.frozen_copies(shape, job))

    @property
    def num_gpus(self) -> int:
        return self.hardware.num_gpus


def moments(case: Case) -> Iterator[Moment]:
    """Every point where memory may peak, in the order of a step."""
    base = resident(case)
    if case.job.generates:
        yield from _generate(case, base)
        yield _score(case, base)
    yield from _update(case, base)
    yield _step(case, base)
    if case.job.use_vllm:
        yield _weight_push(case, base)


def resident(case: Case) -> Terms:
    """There in every phase, from the second optimizer step on: Adam's state appears in the first."""
    job, num_gpus = case.job, case.num_gpus
    terms: Terms = {}
    for engine in case.engines:
        weights = states.trained_bytes(engine, job, num_gpus) + states.frozen_bytes(engine, job, num_gpus)
        terms[f"{engine.role} weights"] = weights
        terms = plus(terms, {"optimizer": states.optimizer_bytes(engine, job, num_gpus)})
        if job.zero_stage in (0, 3):
            terms = plus(terms, {"buckets": states.bucket_bytes(engine, job, num_gpus)})
        if job.zero_stage == 3:
            terms = plus(terms, {"gradients": states.gradient_bytes(engine, job, num_gpus)})
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
    gathered = _gathered_to_generate(case)
    cache = generation.cache_bytes(shape, job, num_gpus)
    prompt_share = job.max_prompt_length / job.sequence_tokens
    prompts = job.generated_at_once(num_gpus) * job.max_prompt_length
    prefill = {"KV cache": cache * prompt_share, "layer work": prompts * act.no_grad_bytes(shape, job)}
    decode = {"KV cache": cache, "head": generation.sampling_bytes(shape, job, num_gpus)}
    yield Moment("generate", "reading the prompts", plus(base, prefill, gathered))
    yield Moment("generate", "the last token of all completions", plus(base, decode, gathered))


def _gathered_to_generate(case: Case) -> Terms:
    if case.job.zero_stage == 3 and case.job.ds3_gather_for_generation:
        return {"gathered weights": 2.0 * lm_params(case.shape)}
    return _gathered(case)


def _gathered(case: Case) -> Terms:
    gathered = states.gathered_bytes(case.shape, lm_params(case.shape), case.job)
    return {"gathered weights": gathered} if gathered else {}


def _gathered_head(case: Case) -> Terms:
    """Under ZeRO-3 the head is whole while it works, among what may stay gathered."""
    job = case.job
    if job.zero_stage != 3:
        return {}
    live = max(embedding_params(case.shape), job.stage3_max_live_parameters)
    return {"gathered weights": 2.0 * min(live, lm_params(case.shape))}


def _score(case: Case, base: Terms) -> Moment:
    shape, job = case.shape, case.job
    layers = job.forward_tokens * act.no_grad_bytes(shape, job)
    num_scored = min(job.scored_tokens, job.forward_tokens)
    head = act.head_forward_bytes(shape, num_scored) + job.forward_tokens * 8 * shape.hidden
    in_layers = Moment("score", "a layer's forward", plus(base, {"layer work": layers}, _gathered(case)))
    in_head = Moment("score", "the head's forward", plus(base, {"head": head}, _gathered_head(case)))
    return max(in_layers, in_head, key=lambda moment: moment.num_bytes)


def _update(case: Case, base: Terms) -> Iterator[Moment]:
    shape, job = case.shape, case.job
    num_tokens, num_held = job.forward_tokens, job.held_tokens
    gathered, buckets = _gathered(case), _buckets(case)
    checkpoints, saved = act.held_bytes(shape, job)
    held = {"checkpoints": num_held * checkpoints, "saved layers": num_held * saved}
    if job.activation_offloading:
        held = {"checkpoints": OFFLOAD_STASH * num_tokens * float(act.checkpoint_bytes(shape, job))}
    before = _gradients_before(case)
    work = {"layer work": num_tokens * _top_layer_bytes(case)}
    yield Moment(
        "update", "backward of the top layer", plus(base, before, buckets, held, work, gathered, _cast_weights(case))
    )
    if job.generates:
        head = {"head": act.head_backward_bytes(shape, job.scored_tokens, not job.uses_lora)}
        tail, whole = {"layer work": num_held * 8.0 * shape.hidden}, _gathered_head(case)
        yield Moment("update", "backward of the head", plus(base, before, buckets, held, tail, head, whole))
    yield _bottom(case, base)
    yield _embedding(case, base)


def _top_layer_bytes(case: Case) -> float:
    """Beyond what is held: all of a recomputed layer; of one that was not checkpointed only what backward adds, and
    the tail of the model."""
    work = act.work_bytes(case.shape, case.job)
    if case.job.checkpoint_every == 1:
        return work
    return work - act.saved_bytes(case.shape, case.job) + 8 * case.shape.hidden


def _bottom(case: Case, base: Terms) -> Moment:
    shape, job = case.shape, case.job
    if job.checkpoint_every:
        per_token = {"checkpoints": float(act.checkpoint_bytes(shape, job)), "layer work": act.work_bytes(shape, job)}
    else:
        per_token = {"layer work": act.work_bytes(shape, job)}
    work = {name: job.forward_tokens * each for name, each in per_token.items()}
    gradients = {name: value - _embedding_to_come(case) for name, value in _gradients(case).items()}
    terms = plus(base, gradients, _buckets(case), work, _gathered(case), _cast_weights(case))
    return Moment("update", "backward of the bottom layer", terms)


def _embedding_to_come(case: Case) -> float:
    """Of all gradients, the embedding table's comes last; a tied head has made it already, and so has an earlier
    micro-batch."""
    shape, job = case.shape, case.job
    is_there = (shape.tied and job.generates) or job.accumulation(case.num_gpus) > 1
    if is_there or job.uses_lora or job.zero_stage > 1:
        return 0.0
    return embedding_params(shape) * (2.0 if job.zero_stage else states.trained_value_bytes(job))


def _embedding(case: Case, base: Terms) -> Moment:
    """Gradients of all but the table are there; in DeepSpeed a table larger than the bucket goes past it."""
    shape, job = case.shape, case.job
    table = states.embedding_gradient_bytes(shape, case.engines[0], job, case.num_gpus)
    rest = {"embedding gradient": table, "layer work": 4.0 * shape.hidden * job.forward_tokens}
    return Moment("update", "backward of the embedding", plus(base, _gradients(case), _buckets(case), rest))


def _gradients(case: Case) -> Terms:
    """All gradients of a micro-batch; ZeRO-3's flat ones are resident."""
    if case.job.zero_stage == 3:
        return {}
    return {"gradients": sum(states.gradient_bytes(engine, case.job, case.num_gpus) for engine in case.engines)}


def _gradients_before(case: Case) -> Terms:
    """Gradients that stand when the last backward begins: of earlier micro-batches, and of the actor's backward."""
    if case.job.accumulation(case.num_gpus) > 1:
        return _gradients(case)
    gradients = _gradients(case)
    if case.job.trainer == "ppo" and case.job.critic == "adapter":
        return {name: value / 2 for name, value in gradients.items()}
    first = [states.gradient_bytes(engine, case.job, case.num_gpus) for engine in case.engines[:-1]]
    return {"gradients": sum(first)} if gradients and first else {}


def _buckets(case: Case) -> Terms:
    """DeepSpeed's while gradients come; under DDP and ZeRO-3 they are resident."""
    if case.job.zero_stage in (0, 3):
        return {}
    return {"buckets": states.bucket_bytes(case.engines[0], case.job, case.num_gpus)}


def _cast_weights(case: Case) -> Terms:
    return {"cast weights": act.cast_weight_bytes(case.shape, case.job)}


def _step(case: Case, base: Terms) -> Moment:
    extra = max(states.step_bytes(engine, case.job, case.num_gpus) for engine in case.engines)
    buckets = _buckets(case) if case.job.zero_stage == 1 else {}
    return Moment("step", "the optimizer step", plus(base, _gradients(case), buckets, {"step copies": extra}))


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


def plus(*parts: Terms) -> Terms:
    """Terms added by name, those of zero left out."""
    total: Terms = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: value for name, value in total.items() if value}


def slack_share(job: Job) -> float:
    """What the allocator reserves beyond what is allocated, as a share (estimated by replaying allocations through a
    model of it; not yet measured on a card)."""
    if job.zero_stage == 3:
        return 0.11 if job.expandable_segments else 0.21
    if job.uses_lora:
        return 0.03 if job.expandable_segments else 0.05
    return 0.06 if job.expandable_segments else 0.17


def slack_bytes(moment: Moment, job: Job) -> float:
    """Fragmentation at a moment; vLLM's share is its own allocator's."""
    return slack_share(job) * (moment.num_bytes - moment.terms.get("vLLM", 0.0))


def usable_bytes(hardware: Hardware) -> float:
    """What a card has for tensors."""
    return hardware.card.usable_gib * GIB
