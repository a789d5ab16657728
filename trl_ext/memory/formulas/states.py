"""Bytes of weights, gradients and optimizer on one GPU, by ZeRO stage.

Adam keeps two fp32 values per parameter; DeepSpeed's bf16 engine also keeps fp32 master weights. Counted in DeepSpeed
0.19.8: under ZeRO-2 the optimizer step holds 2P + 20P/N bytes for P trained parameters on N GPUs (weights 2; of its
share master 4, Adam 8, gradients 2, their flat copy 2, and fp32 gradients 4). Llama-3-8B reward model, N = 8: 31.45
GiB by formula, 31.50 counted.
"""

from typing import NamedTuple

from trl_ext.memory.formulas.engines import Engine
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import (
    backbone_params,
    embedding_params,
    expert_params,
    largest_weight,
    mlp_linears,
    quantised_weights,
)

# bitsandbytes NF4: half a byte, an 8-bit scale per 64 weights, an fp32 scale per 256 scales (double quantisation).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
HOST_BYTES_PER_TRAINED = 18  # master 4, Adam 8, fp32 gradients 4, a bf16 copy 2, over all processes


# Between two steps -------------------------------------------------------------------------------------------------


def weight_bytes(engine: Engine) -> float:
    """Bytes of the weights on one GPU, without DeepSpeed's master copy. A frozen weight takes 2 bytes (4 if DDP or
    FSDP2 loads float32), or 0.516 in NF4, whose scales FSDP2 does not shard."""
    job = engine.job
    each = 4 if job.dtype == "float32" and (job.fsdp or not job.zero_stage) else 2
    frozen = (engine.frozen - engine.quantised) * each + engine.quantised * NF4_BYTES
    whole = frozen + engine.trained * (split_bytes(job) if job.fsdp else value_bytes(job))
    if job.zero_stage != 3:
        return whole
    beside = engine.quantised * (NF4_BYTES - 0.5)
    share = 0.0 if job.offload == "all" else (whole - beside) / engine.num_gpus
    if job.zero_hpz_partition_size > 1:  # a second copy, sharded over a machine, from which backward gathers
        beside += 2.0 * (engine.trained + engine.frozen) / job.zero_hpz_partition_size
    return beside + share


def loaded_bytes(engine: Engine) -> float:
    """Bytes of an adapter's base as loaded, not sharded, in bf16 and 4 bits."""
    return 2.0 * (engine.frozen - engine.quantised) + engine.quantised * NF4_BYTES


def split_bytes(job: Job) -> int:
    """Bytes of one trained weight that FSDP2 has sharded, and of its gradient: accelerate casts all weights to fp32,
    except next to a 4-bit base, where TRL makes adapters bf16."""
    return 2 if job.method == "qlora" else 4


def value_bytes(job: Job) -> int:
    """Bytes of one trained weight, and of its gradient. Without DeepSpeed, adapters and whole models are fp32, but
    adapters on 4 bits and models loaded in bf16 are bf16."""
    is_bf16 = job.zero_stage or job.method == "qlora" or (job.method == "full" and job.dtype == "bfloat16")
    return 2 if is_bf16 else 4


def optimizer_bytes(engine: Engine) -> float:
    """Bytes of Adam's state on one GPU, with fp32 master weights under DeepSpeed."""
    job, is_8bit = engine.job, engine.job.optim == "adamw_bnb_8bit"
    if job.offload != "none":
        return 0.0
    if job.fsdp:
        return 2 * split_bytes(job) * engine.trained / engine.num_gpus
    if job.zero_stage:
        return (6 if is_8bit else 12) * engine.trained / engine.num_gpus
    return float(engine.trained * (2 if is_8bit else 2 * value_bytes(job)))


def bucket_bytes(engine: Engine) -> float:
    """Bytes of the buckets in which gradients wait for their reduction.

    DDP's buckets exist from the start for all gradients, and hold them or, without `gradient_as_bucket_view`, a copy.
    DeepSpeed has one bucket in bf16 (two with `overlap_comm`): ZeRO-3 from the start, ZeRO-1 and 2 while gradients
    come. FSDP2 has none.
    """
    if engine.job.fsdp:
        return 0.0
    if engine.job.zero_stage:
        return (4.0 if engine.job.overlap_comm else 2.0) * engine.job.reduce_bucket_size
    return float(engine.trained * value_bytes(engine.job)) if engine.num_gpus > 1 else 0.0


def host_bytes(engine: Engine) -> float:
    """Bytes of host memory during training, over all processes of the machine."""
    if engine.job.fsdp and engine.job.offload == "all":
        return 4.0 * split_bytes(engine.job) * engine.trained + 2.0 * engine.frozen
    optimizer = HOST_BYTES_PER_TRAINED * engine.trained if engine.job.offload != "none" else 0
    weights = 2 * (engine.trained + engine.frozen) if engine.job.offload == "all" else 0
    return float(optimizer + weights)


# Gradients ---------------------------------------------------------------------------------------------------------


def gradient_bytes(engine: Engine) -> float:
    """Bytes of all gradients at the end of a micro-batch.

    DDP and ZeRO-1 keep all (DDP in its buckets), ZeRO-2 and FSDP2 a share, ZeRO-3 a flat share that always exists. If
    the optimizer is offloaded, gradients leave as they come, under ZeRO-1 after the last micro-batch of a step.
    """
    job = engine.job
    if _live_in_buckets(engine) or (job.zero_stage > 1 and job.offload != "none"):
        return 0.0
    if job.fsdp:
        return split_bytes(job) * engine.trained / engine.num_gpus
    return value_bytes(job) * engine.trained / (engine.num_gpus if job.zero_stage > 1 else 1)


def share_gradient_bytes(engine: Engine) -> float:
    """Bytes of gradients that rank 0 keeps under ZeRO-1 and 2, with the whole embedding table; 0 if offloaded.

    DeepSpeed divides the list of weights. A weight that a share cuts keeps its whole gradient
    (`copy_grads_in_partition` in stage_1_and_2.py). The table is first in the list, so rank 0 holds the most.
    """
    if engine.job.offload != "none":
        return 0.0
    return 2.0 * max(engine.trained / engine.num_gpus, _trained_table(engine))


def _trained_table(engine: Engine) -> int:
    """Elements of the embedding table; 0 if it is frozen."""
    return 0 if engine.frozen else embedding_params(engine.shape)


def settled_gradient_bytes(engine: Engine) -> float:
    """Bytes of an adapter critic's gradients, which are computed before the policy's forward and wait for its backward
    (`trl_ext.trainers.forward.gradient_sync`). Half of the two adapters' weights are the critic's."""
    job = engine.job
    waits = job.trainer == "ppo" and job.critic == "adapter" and not is_joint(job)
    return 0.5 * engine.trained * value_bytes(job) if waits else 0.0


def standing_gradient_bytes(engine: Engine) -> float:
    """Bytes of gradients that wait for the end of an accumulation: all, or rank 0's share under ZeRO-2."""
    return share_gradient_bytes(engine) if engine.job.zero_stage == 2 else gradient_bytes(engine)


def is_kept(engine: Engine) -> bool:
    """Return True if a gradient stays after its backward: not sharded, and not added to an earlier gradient."""
    is_whole = engine.job.zero_stage < 2 and not _live_in_buckets(engine)
    return is_whole and engine.job.num_backwards(engine.num_gpus) == 1


def _live_in_buckets(engine: Engine) -> bool:
    """Return True if DDP's gradients are views of its buckets."""
    return engine.job.zero_stage == 0 and engine.num_gpus > 1 and engine.job.gradient_as_bucket_view


class MlpGradients(NamedTuple):
    """Bytes kept of the down projection's gradient, and bytes after the up projection's gradient has come."""

    kept: float
    after_up: float


def mlp_gradient_bytes(engine: Engine) -> MlpGradients:
    """Bytes of the gradients of the widest MLP during a layer's backward.

    DeepSpeed's bucket takes gradients up to its size; a larger one waits for the next. ZeRO-1 adds it to the gradient
    of an earlier backward. FSDP2 reduces the gradients of a layer together.
    """
    if engine.frozen:
        return MlpGradients(0.0, 0.0)
    shape, job = engine.shape, engine.job
    width = shape.intermediate if shape.experts is None else shape.experts.shared_intermediate or shape.intermediate
    *_, up, down = (float(linear.num_params) for linear in mlp_linears(shape, width))
    waits = is_kept(engine) or job.fsdp or (job.zero_stage > 1 and down > job.reduce_bucket_size)
    kept = value_bytes(job) * down if waits else 0.0
    return MlpGradients(kept, kept + value_bytes(job) * up)


def head_gradient_bytes(engine: Engine, *, is_top: bool) -> float:
    """Bytes of the head's gradient during the layers' backward; ZeRO-2 and 3 have reduced it by then.

    A tied head's gradient waits in autograd for the embedding's, under every stage and below the top layer too.
    """
    is_there = engine.shape.tied or (is_top and is_kept(engine))
    if not (is_there and engine.has_head) or engine.job.uses_lora:
        return 0.0
    return float(embedding_params(engine.shape) * value_bytes(engine.job))


def embedding_gradient_bytes(engine: Engine) -> float:
    """Bytes of the embedding table's gradient when backward makes it. A tied head's gradient is added to it in a third
    tensor; otherwise ZeRO-3 makes the reduced share next to it, and FSDP2 the buffer to reduce."""
    if engine.frozen:
        return 0.0
    is_split = engine.job.zero_stage == 3
    beside = 1 / engine.num_gpus if is_split else 0.0
    beside = 1.0 if engine.job.fsdp or (engine.shape.tied and engine.has_head) else beside
    return (1.0 + beside) * value_bytes(engine.job) * embedding_params(engine.shape)


def later_gradient_bytes(engine: Engine) -> float:
    """Bytes of gradients that the first micro-batch has made before the embedding's: below ZeRO-2 all others, except
    an adapter critic's, which still wait."""
    if not is_kept(engine):
        return 0.0
    return (engine.trained - _trained_table(engine)) * value_bytes(engine.job) - settled_gradient_bytes(engine)


def bottom_gradient_bytes(engine: Engine) -> float:
    """Bytes of this micro-batch's gradients at the bottom layer's backward. Under ZeRO-2 the adapters of other layers
    have filled rank 0's share by then."""
    made = later_gradient_bytes(engine)
    if made and not engine.frozen:
        made -= value_bytes(engine.job) * quantised_weights(engine.shape) / engine.shape.num_layers
    return made + (share_gradient_bytes(engine) if engine.job.zero_stage == 2 and engine.frozen else 0.0)


def reduction_bytes(engine: Engine) -> float:
    """Bytes of gradients while ZeRO-1 and 2 reduce the last gradient, without the gradients of earlier micro-batches.

    ZeRO-1 holds all gradients and rank 0's share, ZeRO-2 the table's and the share. A table that fits into the bucket
    is gone. A larger table is sent in slices of one rank each, flattened together until they exceed a bucket. With the
    optimizer in host memory the table's gradient has a copy, and nobody holds a share.
    """
    job, table = engine.job, embedding_params(engine.shape)
    whole = 2.0 * engine.trained if is_kept(engine) else 0.0  # of ZeRO-1
    if job.offload != "none":
        return whole + (0.0 if engine.frozen else 2.0 * table)
    # ZeRO-2 adds this micro-batch's share to the earlier ones after all of it has come.
    share = share_gradient_bytes(engine)
    is_large = not engine.frozen and table > job.reduce_bucket_size
    each = engine.trained / engine.num_gpus
    num_slices = int(job.reduce_bucket_size // each) + 1
    copy = 2.0 * min(num_slices * each, table) if is_large and num_slices > 1 and table > each else 0.0
    if job.zero_stage == 1:  # the table comes first; the share's buffer is made for its reduced gradient
        return max(share, copy) + whole
    return share + copy + (2.0 * table if is_large else 0.0)


def step_bytes(engine: Engine) -> float:
    """Bytes of the gradient copies that the optimizer step makes; 0 with DDP's fused Adam.

    ZeRO-1 and 2: first one gradient at a time in fp64 for the norm, 8 bytes (rank 0's largest is its part of the
    embedding table), then a flat copy of the share and its fp32 gradients, 2 + 4. ZeRO-3: the second, one sub-group at
    a time. Llama-3-8B over 8: the table in fp64, 3.9 GiB, against 5.6.
    """
    job, share = engine.job, engine.trained / engine.num_gpus
    if job.zero_stage == 0 or job.fsdp or job.offload != "none":
        return 0.0
    if job.zero_stage == 3:
        return 6.0 * min(share, job.sub_group_size)
    return max(8.0 * min(share, _trained_table(engine)), 6.0 * share)


# Weights gathered by ZeRO-3 -----------------------------------------------------------------------------------------


def is_joint(job: Job) -> bool:
    """Return True if actor and critic are adapters of one backbone and go backward together: under ZeRO-3."""
    return job.trainer == "ppo" and job.critic == "adapter" and job.zero_stage == 3


def gathered_bytes(engine: Engine, place: str) -> float:
    """Upper bound of the bytes of weights that ZeRO-3 has gathered on one GPU, by DeepSpeed 0.19's rules.

    * DeepSpeed prefetches while fewer than `stage3_max_live_parameters` are live, `stage3_prefetch_bucket_size` or
      more at once: the last weight may have any size. Weights fetched together come in one buffer and are copied from
      it, so both exist for a moment; a single weight needs no buffer.
    * A recomputed layer keeps its weights until its backward ends; the experts of a mixture come in one buffer. A
      layer larger than the live limit leaves no room to prefetch.
    * The embedding table is fetched during the backward of the bottom layers, together with other weights unless each
      fills the bucket. TRL's fused head reads its weight without a module call, so DeepSpeed gathers it for the whole
      pass, and it takes part of the live limit.
    * If two adapters go backward together, DeepSpeed holds twice the largest weight in addition to their layer.
    * Small gradients wait in the reduction bucket, and are interleaved in a copy of it.

    Total peaks with it, against a replay of DeepSpeed's rules: -3 to +43 % over 2,688 jobs of 14 models with the
    planner's sizes; mean 2.7 %, from 7B on 0.8 %.

    Args:
        place: "forward" of a layer or of the head, "layer" for a layer's backward, "bottom" for the bottom layer's,
            "embedding" for its forward and backward.
    """
    shape, job = engine.shape, engine.job
    if job.zero_stage != 3:
        return 0.0
    if job.fsdp:
        return _gathered_by_fsdp(engine, place)
    model, table, largest = backbone_params(shape), embedding_params(shape), largest_weight(shape)
    if engine.quantised:  # four weights in an element
        model, largest = model - 3 * engine.quantised // 4, table
    live, bucket = job.stage3_max_live_parameters, job.stage3_prefetch_bucket_size
    layer = (model - table) / shape.num_layers
    head = table if engine.has_head else 0
    room, last = max(live - head, 0), table if layer <= live else largest
    if place == "embedding":
        num = 0.0 if shape.tied and engine.has_head else table
    elif place == "forward":
        num = room + bucket + 2 * largest if room else largest
    else:
        num = (layer if job.checkpoint_every else largest) + expert_params(shape)
        if room:
            num = _with_prefetched(num, job, _Weights(table, largest, layer), room, is_bottom=place == "bottom")
        num += 2 * largest if is_joint(job) else 0
        num += job.reduce_bucket_size if not job.uses_lora and largest <= job.reduce_bucket_size < model else 0
    return 2.0 * (head + min(num, model + bucket + last))


class _Weights(NamedTuple):
    """Elements of the embedding table, of the largest weight, and of a layer."""

    table: int
    largest: int
    layer: float


def _with_prefetched(held: float, job: Job, weights: _Weights, room: int, *, is_bottom: bool) -> float:
    """Return the elements gathered in a layer's backward, those prefetched by DeepSpeed included.

    Args:
        held: Elements gathered for the layer itself.
        job: The run's settings.
        weights: Sizes of the model's weights.
        room: Elements that may be live next to the head, more than 0.
        is_bottom: Whether this is the bottom layer, during whose backward the table is fetched.
    """
    live = job.stage3_max_live_parameters
    if weights.layer <= live:
        held += room + job.stage3_prefetch_bucket_size + weights.table
    if is_bottom:
        return max(held, room + (2 if weights.largest <= live else 1) * weights.table)
    return held


def _gathered_by_fsdp(engine: Engine, place: str) -> float:
    """Upper bound of the bytes that FSDP2 has gathered on one GPU, with reduction buffers, as read in PyTorch 2.13.

    * A layer's weights come in one buffer and are copied from it. In forward the buffer stays until the next layer's
      buffer is copied; in backward the next layer's buffer exists together with this layer's weights.
    * The head, and a table tied to it, stays gathered until the backward ends, as accelerate sets it up.
    * A layer's gradients wait in a buffer during the backward of the layer below, the head's during the top layer's.
    """
    shape, table = engine.shape, 2.0 * embedding_params(engine.shape)
    packed = engine.quantised / shape.num_layers
    layer = 2.0 * ((backbone_params(shape) - table / 2) / shape.num_layers - packed) + 0.5 * packed
    reduced = 2.0 * engine.trained / shape.num_layers if engine.frozen else layer
    head = table if engine.has_head else 0.0
    own = 0.0 if head and shape.tied else table  # the table, if it is gathered separately
    if place == "forward":
        return head + max(2 * layer, head, 2 * own)
    if place == "embedding":
        return head + own + reduced
    if place == "bottom":
        return head + layer + max(layer, own) + reduced
    return head + 2 * layer + (reduced if engine.frozen else max(reduced, head))
