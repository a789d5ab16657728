"""Bytes of weights, gradients and optimizer on one GPU, by ZeRO stage.

Adam keeps two fp32 values a parameter; DeepSpeed's bf16 engine keeps fp32 master weights besides. Counted in
DeepSpeed 0.19.8: under ZeRO-2 the optimizer step holds 2P + 20P/N bytes for P trained parameters on N GPUs (weights 2;
of its share master 4, Adam 8, gradients 2, their flat copy 2, and fp32 gradients 4). Llama-3-8B reward model, N = 8:
31.45 GiB by formula, 31.50 counted.
"""

from dataclasses import dataclass

from trl_ext.memory.job import Job
from trl_ext.memory.shapes import ModelShape, embedding_params, largest_weight, quantised_weights

# bitsandbytes NF4: half a byte, an 8-bit scale for 64 weights, an fp32 scale for 256 of those (double quantisation).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
HOST_BYTES_PER_TRAINED = 18  # master 4, Adam 8, fp32 gradients 4, a bf16 copy 2, over all processes


@dataclass(frozen=True, slots=True)
class Engine:
    """Weights that one optimizer trains, and the frozen ones below them.

    Args:
        role: "policy" or "critic".
        trained: Parameters trained.
        frozen: Parameters frozen in the same module.
        quantised: How many of the frozen ones are in 4 bits.
    """

    role: str
    trained: int
    frozen: int = 0
    quantised: int = 0


def base_engine(role: str, shape: ModelShape, num_params: int, num_adapter_params: int, job: Job) -> Engine:
    """A model of `num_params` trained as the job says."""
    if not job.uses_lora:
        return Engine(role, num_params)
    quantised = quantised_weights(shape) if job.method == "qlora" else 0
    return Engine(role, num_adapter_params, num_params, quantised)


def frozen_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """Frozen weights on one GPU: 2 bytes (4 if loaded in float32), 0.516 in NF4; split by ZeRO-3 alone."""
    each = 4 if job.dtype == "float32" and not job.zero_stage else 2
    whole = (engine.frozen - engine.quantised) * each + engine.quantised * NF4_BYTES
    return _split(whole, job, num_gpus)


def trained_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """Trained weights on one GPU, without DeepSpeed's master copy."""
    if job.zero_stage:
        return _split(2.0 * engine.trained, job, num_gpus)
    return float(engine.trained * trained_value_bytes(job))


def trained_value_bytes(job: Job) -> int:
    """Of one trained weight outside DeepSpeed: adapters and whole models are fp32, adapters on 4 bits are bf16."""
    is_bf16 = job.method == "qlora" or (job.method == "full" and job.dtype == "bfloat16")
    return 2 if is_bf16 else 4


def optimizer_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """Adam's state, and under DeepSpeed the fp32 master weights, on one GPU."""
    if job.offload != "none":
        return 0.0
    is_8bit = job.optim == "adamw_bnb_8bit"
    if job.zero_stage:
        return (6 if is_8bit else 12) * engine.trained / num_gpus
    return float(engine.trained * (2 if is_8bit else 2 * trained_value_bytes(job)))


def gradient_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """All gradients at the end of a micro-batch.

    DDP and ZeRO-1 keep them whole, ZeRO-2 its share, ZeRO-3 a flat share that is there always. With the optimizer in
    host memory they leave as they come.
    """
    if job.zero_stage == 0:
        return float(engine.trained * trained_value_bytes(job))
    if job.offload != "none":
        return 0.0
    return 2.0 * engine.trained / (1 if job.zero_stage == 1 else num_gpus)


def step_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """What the optimizer step holds beyond weights, gradients and state.

    ZeRO-1: a flat bf16 copy of its share. ZeRO-2: that and fp32 gradients of its share. ZeRO-3: both, one sub-group at
    a time. The fused Adam of DDP needs nothing.
    """
    if job.zero_stage == 0 or job.offload != "none":
        return 0.0
    share = engine.trained / num_gpus
    return {1: 2 * share, 2: 6 * share, 3: 6 * min(share, job.sub_group_size)}[job.zero_stage]


def bucket_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """Where gradients wait for their reduction.

    DDP holds a second copy of all of them from the start (`gradient_as_bucket_view` is off and no argument of the
    Trainer). DeepSpeed has one bucket in bf16, ZeRO-3 from the start, 1 and 2 while gradients come.
    """
    if job.zero_stage:
        return 2.0 * job.reduce_bucket_size
    return float(engine.trained * trained_value_bytes(job)) if num_gpus > 1 else 0.0


def gathered_bytes(shape: ModelShape, num_params: int, job: Job) -> float:
    """Weights that ZeRO-3 has gathered while a layer runs: those it may keep, those it fetches ahead, and the
    largest one at hand; never more than the model. A model below stage3_max_live_parameters stays gathered."""
    if job.zero_stage != 3:
        return 0.0
    ahead = job.stage3_max_live_parameters + job.stage3_prefetch_bucket_size
    return 2.0 * min(num_params, ahead + largest_weight(shape))


def embedding_gradient_bytes(shape: ModelShape, engine: Engine, job: Job, num_gpus: int) -> float:
    """The embedding table's gradient at the end of backward, beyond what `gradient_bytes` counts.

    DeepSpeed holds it and a flat copy of it before it is reduced (2 * 2VH). Without DeepSpeed it *is* the gradient in
    the first micro-batch of a step, and is added to it in later ones; a tied head adds it once more.
    """
    if engine.frozen:
        return 0.0
    if job.zero_stage:
        return 4.0 * embedding_params(shape)
    num_copies = 2 if shape.tied and job.generates else int(job.accumulation(num_gpus) > 1)
    return float(num_copies * trained_value_bytes(job) * embedding_params(shape))


def host_bytes(engine: Engine, job: Job, num_gpus: int) -> float:
    """Host memory while training, over all processes of the machine."""
    optimizer = HOST_BYTES_PER_TRAINED * engine.trained if job.offload != "none" else 0
    weights = 2 * (engine.trained + engine.frozen) if job.offload == "all" else 0
    return float(optimizer + weights)


def _split(whole: float, job: Job, num_gpus: int) -> float:
    if job.zero_stage != 3:
        return whole
    return 0.0 if job.offload == "all" else whole / num_gpus
