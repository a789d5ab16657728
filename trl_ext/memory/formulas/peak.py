"""Memory of one GPU at each place where it may peak, by phase and term.

A phase has several such places with different terms; its peak is the largest. In forward and backward the head comes
first, then the layers from the top, then the embedding table: the backward of the top layer holds all checkpoints, of
the bottom layer all gradients. All bytes are estimates from formulas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas import activations as act
from trl_ext.memory.formulas import generation, states
from trl_ext.memory.formulas.engines import Engine, FrozenCopy, engines, frozen_copies, num_scoring_passes
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape, lm_params
from trl_ext.memory.units import GIB

PHASES = ("generate", "score", "update", "step", "weight_push", "load")
PHASE_WORDS = {
    "generate": "while generating",
    "score": "while scoring",
    "update": "in forward and backward",
    "step": "at the optimizer step",
    "weight_push": "while weights go to vLLM",
    "load": "while loading",
}
OFFLOAD_STASH = 5  # checkpoints that TRL's activation offloading still holds on the card while it copies

Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one GPU at a place of a step where it may peak.

    Args:
        phase: One of PHASES.
        what: The place in words: "backward of the top layer".
        terms: Bytes by term; they add up.
    """

    phase: str
    what: str
    terms: Terms

    @property
    def num_bytes(self) -> float:
        """Bytes of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, job and machine, with the models that the run holds."""

    shape: ModelShape
    job: Job
    hardware: Hardware
    engines: Sequence[Engine]
    copies: Sequence[FrozenCopy]

    @classmethod
    def of(cls, shape: ModelShape, job: Job, hardware: Hardware) -> "Setup":
        """The setup of a job with a model on a machine."""
        num_gpus = job.training_gpus(hardware.num_gpus)
        return cls(shape, job, hardware, engines(shape, job, num_gpus), frozen_copies(shape, job))

    @property
    def num_gpus(self) -> int:
        """GPUs that train, without the GPUs of vLLM servers."""
        return self.job.training_gpus(self.hardware.num_gpus)


def plus(*parts: Terms) -> Terms:
    """Add terms by name and leave out zeros."""
    total: Terms = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: value for name, value in total.items() if value}


def footprints(setup: Setup) -> Iterator[Footprint]:
    """Yield the footprint at each place where memory may peak, in the order of a step."""
    job, base = setup.job, resident(setup)
    phases = {"update": _update, "step": _step}
    if job.generates:
        phases = {"generate": _generate, "score": _score, **phases}
    if job.use_vllm:  # a server needs as much here as an awake vLLM: the largest weight, gathered
        phases["weight_push"] = _weight_push
    if job.zero_stage == 3 and job.method == "qlora":  # quantised on the card, sharded when training starts
        vllm = {"vLLM": generation.vllm_bytes(setup.hardware.card, job)} if job.shares_with_vllm else {}
        whole = {"policy weights": sum(states.loaded_bytes(engine) for engine in setup.engines)}
        yield Footprint("load", "the whole 4-bit base", whole | vllm)
    for phase, places in phases.items():
        for what, terms in places(setup):
            # A phase's term for vLLM replaces the resident term.
            rest = {name: value for name, value in base.items() if name != "vLLM" or name not in terms}
            yield Footprint(phase, what, plus(rest, terms))


def resident(setup: Setup) -> Terms:
    """Return bytes by term that every phase holds, from the second optimizer step on: the first makes Adam's state."""
    job, terms = setup.job, Terms()
    for engine in setup.engines:
        own = {f"{engine.role} weights": states.weight_bytes(engine), "optimizer": states.optimizer_bytes(engine)}
        if job.zero_stage in (0, 3):
            own["buckets"] = states.bucket_bytes(engine)
        if job.zero_stage == 3:
            own["gradients"] = states.gradient_bytes(engine)
        terms = plus(terms, own)
    for copy in setup.copies:
        terms[f"{copy.role} weights"] = copy.bytes_per_gpu(job, setup.num_gpus)
    if job.shares_with_vllm:
        awake = generation.vllm_bytes(setup.hardware.card, job)
        terms["vLLM"] = generation.RESIDUE_BYTES if job.vllm_enable_sleep_mode else awake
    return terms


# Generating, scoring, pushing weights ------------------------------------------------------------------------------

Places = Iterator[tuple[str, Terms]]


def _generate(setup: Setup) -> Places:
    shape, job, num_gpus = setup.shape, setup.job, setup.num_gpus
    if job.use_vllm:
        yield "vLLM at work", {"vLLM": generation.vllm_bytes(setup.hardware.card, job)} if job.shares_with_vllm else {}
        return
    if job.zero_stage == 3 and job.gathers_to_generate:
        whole = 2.0 * lm_params(shape)
    else:
        whole = max(states.gathered_bytes(setup.engines[0], place) for place in ("forward", "embedding"))
    gathered = {"gathered weights": whole}
    cache = generation.cache_bytes(shape, job, num_gpus)
    prompts = job.generated_at_once(num_gpus) * job.max_prompt_length
    prefill = {"KV cache": cache * job.max_prompt_length / job.sequence_tokens}
    work = prompts * act.no_grad_bytes(shape, job, job.max_prompt_length)
    yield "reading the prompts", {**gathered, **prefill, "layer work": work}
    # Logits of the next token for every completion: bf16, fp32, and two fp32 copies while sampling.
    head = float(job.generated_at_once(num_gpus) * shape.vocab * 14)
    yield "the last token of all completions", {**gathered, "KV cache": cache, "head": head}


def _score(setup: Setup) -> Places:
    """Yield the places of forwards without gradients. Under autocast the policy's forwards leave bf16 copies of its
    weights until they end."""
    shape, job, policy = setup.shape, setup.job, setup.engines[0]
    yield "a layer's forward", _layer_forward(policy)
    if job.fsdp and job.trainer == "grpo" and any(copy.role == "reference" for copy in setup.copies):
        # TRL shards the reference as one unit: its weights arrive in a buffer and are copied from there.
        yield "the reference's forward", plus(_layer_forward(policy), {"gathered weights": 4.0 * lm_params(shape)})
    if num_scoring_passes(job, setup.num_gpus):
        num_scored = min(job.scored_tokens, job.forward_tokens)
        head = act.head_forward_bytes(shape, job, num_scored) + job.forward_tokens * 8 * shape.hidden
        gathered = {"gathered weights": states.gathered_bytes(policy, "forward")}
        yield "the head's forward", {**gathered, "head": head, "cast weights": act.cast_cache_bytes(shape, job)}


def _layer_forward(engine: Engine) -> Terms:
    shape, job = engine.shape, engine.job
    work = job.forward_tokens * act.no_grad_bytes(shape, job, job.sequence_tokens)
    return {"layer work": work, "gathered weights": states.gathered_bytes(engine, "forward")}


def _weight_push(setup: Setup) -> Places:
    """Yield the place where weights go to an awake vLLM: one layer at a time if ZeRO-3 shards or LoRA merges."""
    shape, job = setup.shape, setup.job
    largest = (states.split_bytes(job) if job.fsdp else 2.0) * shape.vocab * shape.hidden
    pushed = largest if job.zero_stage == 3 or job.uses_lora else 0.0
    terms = {"gathered weights": pushed}
    if job.shares_with_vllm and job.vllm_enable_sleep_mode:
        terms["vLLM"] = generation.vllm_weight_bytes(shape, job) + generation.RESIDUE_BYTES
    yield "weights on their way", terms


# Forward and backward ----------------------------------------------------------------------------------------------


def _update(setup: Setup) -> Places:
    """Yield the places of forward and backward, one engine after the other. Later engines find the gradients of
    earlier ones that have not stepped yet."""
    for place, engine in enumerate(setup.engines):
        # An engine that has scored and goes backward later keeps its prefetched weights.
        later = [states.gathered_bytes(other, "forward") for other in setup.engines[place + 1 :]]
        before = {"gathered weights": sum(later), "gradients": _gradients_of_others(setup, engine)}
        before["gradients"] += states.settled_gradient_bytes(engine)
        before["kept prompt"] = 0.0
        if setup.job.num_backwards(setup.num_gpus) > 1:
            if setup.job.zero_stage < 3:
                before["gradients"] += states.standing_gradient_bytes(engine)
            if engine.role == "policy":  # whose prompts are kept for the step's other forwards
                before["kept prompt"] = act.kept_bytes(engine.shape, engine.job)
        for what, terms in _forward_and_backward(engine):
            yield what, plus(before, terms)


def _gradients_of_others(setup: Setup, engine: Engine) -> float:
    """Return bytes of gradients of engines that do not go backward now: from earlier micro-batches, and without
    DeepSpeed from the engine before, which steps last."""
    job = setup.job
    is_left = not job.zero_stage and engine is not setup.engines[0]
    if job.zero_stage == 3 or not (is_left or job.accumulation(setup.num_gpus) > 1):
        return 0.0
    return sum(states.standing_gradient_bytes(other) for other in setup.engines if other is not engine)


def _forward_and_backward(engine: Engine) -> Places:
    shape, job = engine.shape, engine.job
    checkpoint = float(act.checkpoint_bytes(shape, job))
    checkpoints, saved = act.held_bytes(shape, job)  # per token
    num_held = job.held_tokens * (2 if states.is_joint(job) else 1)
    held = {"checkpoints": num_held * checkpoints, "saved layers": num_held * saved}
    if job.activation_offloading and job.checkpoint_every:
        held = {"checkpoints": OFFLOAD_STASH * job.forward_tokens * checkpoint}
    if job.zero_stage == 3:
        yield "forward of a layer", plus(held, _layer_forward(engine))
    if engine.has_head:
        yield from ((what, plus(held, terms)) for what, terms in _head(engine, num_held))
    # DeepSpeed's bucket exists while gradients come; under DDP and ZeRO-3 it is resident.
    buckets = {"buckets": states.bucket_bytes(engine) if job.zero_stage in (1, 2) else 0.0}
    rest = {**buckets, "cast weights": act.cast_weight_bytes(shape, job)}
    top = {"gradients": states.head_gradient_bytes(engine, is_top=True), "layer work": _top_layer_bytes(engine)}
    yield from _layer(engine, "backward of the top layer", plus(held, rest, top))
    pending = {"gradients": states.head_gradient_bytes(engine, is_top=False)}
    num_left = shape.num_layers // engine.num_gpus
    if job.zero_stage == 2 and not engine.frozen and num_left:
        # Rank 0 makes the buffer of its share for the share's first gradient, of a norm. Norms are divided separately:
        # the buffer exists when 1/N of the layers, with their checkpoints, are left.
        one = job.held_tokens / shape.num_layers * num_left
        left = {"checkpoints": 0.0 if job.activation_offloading else one * checkpoints, "saved layers": one * saved}
        left |= {"gradients": states.share_gradient_bytes(engine), "layer work": _top_layer_bytes(engine)}
        what = "backward of the first layer with a share of the gradients"
        yield from _layer(engine, what, plus(left, rest, pending))
    new = {"gradients": states.bottom_gradient_bytes(engine)}
    new["layer work"] = job.forward_tokens * act.work_bytes(shape, job)
    new["checkpoints"] = job.forward_tokens * checkpoint if job.checkpoint_every else 0.0
    yield from _layer(engine, "backward of the bottom layer", plus(new, rest, pending), place="bottom")
    yield from _embedding(engine, plus(buckets, pending))


def _head(engine: Engine, num_held: int) -> Places:
    """Yield the fused head's forward, with all of autocast's copies, and its backward.

    DeepSpeed makes its bucket for the first gradient: of a value head on the same hidden states, if it exists.
    ZeRO-1 makes it in the first backward of an accumulation and keeps it (ignored for adapters, whose peak is usually
    elsewhere)."""
    shape, job = engine.shape, engine.job
    tail = {"layer work": num_held * 8.0 * shape.hidden, "gathered weights": states.gathered_bytes(engine, "forward")}
    forward = act.head_forward_bytes(shape, job, job.scored_tokens)
    yield "forward of the head", {**tail, "head": forward, "cast weights": act.cast_cache_bytes(shape, job)}
    has_bucket = job.trainer == "ppo" and job.critic == "head" and job.zero_stage in (1, 2)
    has_bucket |= job.zero_stage == 1 and not job.uses_lora and job.num_backwards(engine.num_gpus) > 1
    bucket = states.bucket_bytes(engine) if has_bucket else 0.0
    backward = act.head_backward_bytes(shape, job, job.scored_tokens)
    yield "backward of the head", {**tail, "head": backward, "buckets": bucket}


def _layer(engine: Engine, what: str, terms: Terms, place: str = "layer") -> Places:
    """Yield two places in a layer's MLP: the product's backward, with the most activations, and a later place with
    fewer activations but all other terms. The later place is the backward of the up projection, after 6I per token
    were freed and 2H and its gradient were added; with adapters, whose gradients are small, it is the end of the
    recomputation, after 4I were freed and 8H added.

    Args:
        engine: The engine of the trained model.
        what: Name of the phase in tables.
        terms: Bytes per GPU by name that are held during the layer's backward.
        place: "layer", "bottom" or another place of `states.gathered_bytes`, which names the weights gathered there.
    """
    shape, job = engine.shape, engine.job
    gradients = states.mlp_gradient_bytes(engine)
    gathered = {"gathered weights": states.gathered_bytes(engine, place)}
    yield what, plus(terms, gathered, {"gradients": gradients.kept})
    mlps, hiddens = (4.0, 8.0) if job.uses_lora else (6.0, 2.0)
    gone = job.forward_tokens * (mlps * act.mlp_width(shape) - hiddens * shape.hidden)
    # Eager attention comes after the MLP, with all of its gradients.
    in_attention = act.eager_work_bytes(shape, job, act.scores_of(shape, job).backward, job.sequence_tokens)
    above = job.forward_tokens * (act.work_bytes(shape, job) - in_attention)
    less = {"layer work": -min(gone, above, terms["layer work"])}
    yield what, plus(terms, gathered, less, {"gradients": gradients.after_up})


def _top_layer_bytes(engine: Engine) -> float:
    """Return bytes of the top layer's work beyond what is held: a whole recomputed layer, or what backward adds to a
    saved layer. Of two joint adapters (ZeRO-3) the other also holds the fp32 input of its last norm and its head's
    hidden states, 4H and 2H per token."""
    shape, job = engine.shape, engine.job
    work = act.work_bytes(shape, job) - (act.saved_bytes(shape, job) if job.checkpoint_every != 1 else 0.0)
    other = (4.0 * job.forward_tokens + 2.0 * job.scored_tokens) * shape.hidden
    return job.forward_tokens * work + (other if states.is_joint(job) else 0.0)


def _embedding(engine: Engine, terms: Terms) -> Places:
    """Yield the places of the table's gradient, which comes last. Rank 0 of ZeRO-1 and 2 copies it into its share;
    ZeRO-1 reduces all gradients only now."""
    job = engine.job
    table = {"embedding gradient": states.embedding_gradient_bytes(engine)}
    table["gradients"] = states.later_gradient_bytes(engine)
    table["gathered weights"] = states.gathered_bytes(engine, "embedding")
    table["layer work"] = 4.0 * engine.shape.hidden * job.forward_tokens
    yield "backward of the embedding", plus(terms, table)
    if job.zero_stage in (1, 2):
        reduced = {"buckets": states.bucket_bytes(engine), "gradients": states.reduction_bytes(engine)}
        yield "the last reduction", reduced


# The optimizer step ------------------------------------------------------------------------------------------------


def _step(setup: Setup) -> Places:
    """Yield the step of each optimizer. DeepSpeed holds its share of the gradients; without DeepSpeed all gradients of
    all engines exist."""
    job = setup.job
    for engine in setup.engines:
        if job.zero_stage == 0:
            gradients = sum(states.gradient_bytes(one) for one in setup.engines)
        else:
            own = states.share_gradient_bytes(engine) if job.zero_stage < 3 else 0.0
            gradients = own + _gradients_of_others(setup, engine)
        yield "the optimizer step", {"step copies": states.step_bytes(engine), "gradients": gradients}


# Beyond what is allocated ------------------------------------------------------------------------------------------


def slack_share(job: Job) -> float:
    """Share of the allocated bytes that the allocator reserves in addition, with native or expandable segments.

    Below ZeRO-3: the largest share in replays of 14 runs of an 8B model through a replica of the allocator, rounded
    up; native without ZeRO twice the largest share of two updates on a card, where the replays gave 17 %.
    ZeRO-3: what published runs used beyond these formulas (`benchmarks/published.py`): native -1 to 25 %, within 10 %
    of the whole with a tenth; expandable 6 to 10 %, of which the 32B runs on 8 cards of 80 GB have room for 6.
    """
    if job.zero_stage == 3:
        native, expandable = 0.10, 0.06
    elif job.uses_lora:
        native, expandable = 0.05, 0.03
    else:
        native, expandable = (0.20, 0.08) if job.zero_stage else (0.10, 0.06)
    return expandable if job.expandable_segments else native


def slack_bytes(footprint: Footprint, job: Job) -> float:
    """Bytes of fragmentation for a footprint, without vLLM's share, which has a separate allocator."""
    return slack_share(job) * (footprint.num_bytes - footprint.terms.get("vLLM", 0.0))


def room_bytes(hardware: Hardware, job: Job, num_bytes: float) -> float:
    """Bytes of a card that a plan may still fill, next to allocated bytes and their slack; negative if too much is
    allocated. Under ZeRO-3 the slack counts towards the head-room, because published runs that work leave least."""
    fill, slack = hardware.fill_gib * GIB - num_bytes, slack_share(job) * num_bytes
    if job.zero_stage == 3:
        return min(fill, hardware.card.usable_gib * GIB - num_bytes - slack)
    return fill - slack
