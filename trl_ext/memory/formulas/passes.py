"""Forward and backward: the points where they may peak, for each engine that goes backward.

The head comes first, then the layers from the top, then the embedding table; gradients grow while checkpoints shrink.
"""

from collections.abc import Iterator

from trl_ext.memory.formulas import activations as act
from trl_ext.memory.formulas import states
from trl_ext.memory.formulas.case import Case, Moment, Terms, plus
from trl_ext.memory.formulas.engines import Part
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import embedding_params, head_params

OFFLOAD_STASH = 5  # checkpoints that TRL's activation offloading keeps on the card, on their way


def update_moments(case: Case, base: Terms) -> Iterator[Moment]:
    """Of each engine in turn. Those that come after the first find its gradients, unless it has stepped before."""
    for place, part in enumerate(case.parts):
        # An engine that has scored and goes backward later keeps what it has fetched ahead.
        later = case.parts[place + 1 :]
        left = [states.gathered_bytes(case.shape, other.job, other.has_head, "forward") for other in later]
        before = plus(gathered(sum(left)), gradients_of_others(case, part), _gradients_before(case, part))
        yield from _backward(case, part, plus(base, before))


def _backward(case: Case, part: Part, base: Terms) -> Iterator[Moment]:
    shape, job = case.shape, part.job
    num_held = job.held_tokens * (2 if _is_joint(job) else 1)
    checkpoints, saved = act.held_bytes(shape, job)
    held = {"checkpoints": num_held * checkpoints, "saved layers": num_held * saved}
    if job.activation_offloading:
        held = {"checkpoints": OFFLOAD_STASH * job.forward_tokens * float(act.checkpoint_bytes(shape, job))}
    if job.zero_stage == 3:
        yield Moment("update", "forward of a layer", plus(base, held, layer_forward(case, part)))
    if part.has_head:
        yield from _head(case, part, plus(base, held), num_held)
    rest = plus(base, held, _head_gradient(case, part), _buckets(case, part), _cast_weights(case, part))
    work = job.forward_tokens * _top_layer_bytes(case, part) + _other_tail_bytes(case, part)
    yield from _layer(case, part, "backward of the top layer", rest, work)
    yield from _with_share(case, part, base, (checkpoints, saved))
    yield from _bottom(case, part, base)
    yield from _embedding(case, part, base)


def _layer(case: Case, part: Part, what: str, rest: Terms, work: float, is_bottom: bool = False) -> Iterator[Moment]:
    """Two points in a layer's MLP: its product's backward, with the most activations; and one with fewer of them but
    all else. That is the backward of the projection up, when 6I a token have gone, 2H have come, and so has its
    gradient; with adapters, which have small ones, the end of the recomputation, 4I and 8H."""
    shape, job = case.shape, part.job
    kept, up = states.mlp_gradient_bytes(shape, part.engine, job, case.num_gpus)
    whole = gathered(states.gathered_bytes(shape, job, part.has_head, "bottom" if is_bottom else "layer"))
    yield Moment("update", what, plus(rest, whole, {"layer work": work, "gradients": kept}))
    mlps, hiddens = (4.0, 8.0) if job.uses_lora else (6.0, 2.0)
    gone = job.forward_tokens * (mlps * act.mlp_width(shape) - hiddens * shape.hidden)
    yield Moment("update", what, plus(rest, whole, {"layer work": max(work - gone, 0.0), "gradients": up}))


def _head(case: Case, part: Part, base: Terms, num_held: int) -> Iterator[Moment]:
    """The fused head, forward (with all of autocast's copies) and backward. DeepSpeed makes its bucket for the first
    gradient: of a value head on the same hidden states, if there is one, or else later."""
    shape, job = case.shape, part.job
    tail = {"layer work": num_held * 8.0 * shape.hidden}
    whole = gathered(states.gathered_bytes(shape, job, part.has_head, "forward"))
    forward = {
        "head": act.head_forward_bytes(shape, job, job.scored_tokens),
        "cast weights": act.cast_cache_bytes(shape, job),
    }
    yield Moment("update", "forward of the head", plus(base, tail, forward, whole))
    backward = {"head": act.head_backward_bytes(shape, job, job.scored_tokens)}
    buckets = _buckets(case, part) if job.trainer == "ppo" and job.critic == "head" else {}
    yield Moment("update", "backward of the head", plus(base, tail, backward, buckets, whole))


def _other_tail_bytes(case: Case, part: Part) -> float:
    """An adapter critic goes backward with the actor, in one: while the layers of one forward do, the other one holds
    its last norm's fp32 input and what its head has scored, 4H and 2H a token."""
    job, hidden = part.job, case.shape.hidden
    if not _is_joint(job):
        return 0.0
    return job.forward_tokens * 4.0 * hidden + job.scored_tokens * 2.0 * hidden


def _is_joint(job: Job) -> bool:
    return job.trainer == "ppo" and job.critic == "adapter"


def _top_layer_bytes(case: Case, part: Part) -> float:
    """Beyond what is held: all of a recomputed layer; of one that was not checkpointed only what backward adds, or the
    last norm's backward over all tokens, 24H, if that is more: the policy's losses reach it with the scored ones.
    Without any checkpoint the first layer's input needs no gradient below DeepSpeed's adapters, and its norm keeps 4H
    less."""
    shape, job = case.shape, part.job
    work = act.work_bytes(shape, job)
    if job.checkpoint_every == 1:
        return work
    added = work - act.saved_bytes(shape, job)
    if not part.has_head:
        added = max(added, 24.0 * shape.hidden)
    is_unneeded = not job.checkpoint_every and act.mode_of(job) is act.Mode.LORA_BF16
    return added - (4.0 * shape.hidden if is_unneeded else 0.0)


def _with_share(case: Case, part: Part, base: Terms, held: tuple[float, float]) -> Iterator[Moment]:
    """Rank 0 of ZeRO-2 makes the buffer of its share of the gradients for the first of them: a norm's, which are
    shared out on their own, so that it is there when an N-th of the layers, and their checkpoints, are left."""
    shape, job = case.shape, part.job
    num_left = shape.num_layers // case.num_gpus
    if job.zero_stage != 2 or part.engine.frozen or not num_left:
        return
    checkpoints, saved = (job.held_tokens * num / shape.num_layers * num_left for num in held)
    left = {"checkpoints": 0.0 if job.activation_offloading else checkpoints, "saved layers": saved}
    left["gradients"] = states.share_gradient_bytes(shape, part.engine, job, case.num_gpus, part.has_head)
    rest = plus(base, left, _pending(case, part), _buckets(case, part), _cast_weights(case, part))
    work = job.forward_tokens * _top_layer_bytes(case, part)
    yield from _layer(case, part, "backward of the first layer with a share of the gradients", rest, work)


def _bottom(case: Case, part: Part, base: Terms) -> Iterator[Moment]:
    """All layers above have their gradients."""
    shape, job = case.shape, part.job
    work = job.forward_tokens * act.work_bytes(shape, job)
    new = {"gradients": states.bottom_gradient_bytes(shape, part.engine, job, case.num_gpus)}
    if job.zero_stage == 2 and part.engine.frozen:  # adapters of other layers have filled this micro-batch's share
        new["gradients"] += states.share_gradient_bytes(shape, part.engine, job, case.num_gpus, part.has_head)
    if job.checkpoint_every:
        new["checkpoints"] = job.forward_tokens * float(act.checkpoint_bytes(shape, job))
    rest = plus(base, new, _pending(case, part), _buckets(case, part), _cast_weights(case, part))
    yield from _layer(case, part, "backward of the bottom layer", rest, work, is_bottom=True)


def _embedding(case: Case, part: Part, base: Terms) -> Iterator[Moment]:
    """The table's gradient comes last. Rank 0 of ZeRO-1 and 2 copies it into its share, and ZeRO-1 reduces all
    gradients only now."""
    shape, job, engine = case.shape, part.job, part.engine
    work = {"layer work": 4.0 * shape.hidden * job.forward_tokens}
    all_others = states.later_gradient_bytes(shape, engine, job, case.num_gpus)
    table = {"embedding gradient": states.embedding_gradient_bytes(shape, engine, job, case.num_gpus, part.has_head)}
    whole = gathered(states.gathered_bytes(shape, job, part.has_head, "embedding"))
    buckets = _buckets(case, part)
    terms = plus(base, {"gradients": all_others}, _pending(case, part), buckets, table, whole, work)
    yield Moment("update", "backward of the embedding", terms)
    if job.zero_stage in (1, 2):
        reduced = states.reduction_bytes(shape, engine, job, case.num_gpus, part.has_head)
        yield Moment("update", "the last reduction", plus(base, {"gradients": reduced}, _buckets(case, part)))


# Gradients --------------------------------------------------------------------------------------------------------


def gradients_of_others(case: Case, part: Part) -> Terms:
    """Gradients of engines that do not go backward now: of earlier micro-batches; and without DeepSpeed those of the
    engine before, whose optimizer steps last."""
    if case.job.zero_stage == 3:
        return {}
    is_second = part is not case.parts[0]
    waits = case.job.num_backwards(case.num_gpus) > (2 if is_second and case.job.zero_stage else 1)
    stand = waits or (is_second and not case.job.zero_stage)
    others = [other for other in case.parts if other is not part] if stand else []
    return {"gradients": sum(standing_bytes(case, other) for other in others)}


def _gradients_before(case: Case, part: Part) -> Terms:
    """Its own of earlier micro-batches."""
    if case.job.zero_stage == 3 or case.job.num_backwards(case.num_gpus) == 1:
        return {}
    return {"gradients": standing_bytes(case, part)}


def standing_bytes(case: Case, part: Part) -> float:
    """Gradients that wait for the end of an accumulation: whole, or under ZeRO-2 rank 0's share."""
    if part.job.zero_stage == 2:
        return states.share_gradient_bytes(case.shape, part.engine, part.job, case.num_gpus, part.has_head)
    return states.gradient_bytes(part.engine, part.job, case.num_gpus)


def _head_gradient(case: Case, part: Part) -> Terms:
    """The head's, while the layers go backward: whole below ZeRO-2, which has reduced it; a tied one waits in autograd
    for the embedding's."""
    shape, job = case.shape, part.job
    if not part.has_head or job.uses_lora:
        return {}
    if shape.tied:
        return _pending(case, part)
    is_new = job.zero_stage < 2 and job.num_backwards(case.num_gpus) == 1
    is_new = is_new and not states.live_in_buckets(job, case.num_gpus)
    return {"gradients": float(head_params(shape) * states.gradient_value_bytes(job))} if is_new else {}


def _pending(case: Case, part: Part) -> Terms:
    """A tied head's gradient: autograd adds the embedding's to it before anyone sees it."""
    if not part.has_head or part.job.uses_lora or not case.shape.tied:
        return {}
    return {"gradients": float(embedding_params(case.shape) * states.gradient_value_bytes(part.job))}


def _buckets(case: Case, part: Part) -> Terms:
    """DeepSpeed's while gradients come; under DDP and ZeRO-3 they are resident."""
    if case.job.zero_stage in (0, 3):
        return {}
    return {"buckets": states.bucket_bytes(part.engine, part.job, case.num_gpus)}


def _cast_weights(case: Case, part: Part) -> Terms:
    return {"cast weights": act.cast_weight_bytes(case.shape, part.job)}


def layer_forward(case: Case, part: Part) -> Terms:
    """A layer's forward, the bottom one's beside the embedding table."""
    work = part.job.forward_tokens * act.no_grad_bytes(case.shape, part.job)
    return {"layer work": work, **gathered(states.gathered_bytes(case.shape, part.job, part.has_head, "forward"))}


def gathered(num_bytes: float) -> Terms:
    """As a term."""
    return {"gathered weights": num_bytes}
