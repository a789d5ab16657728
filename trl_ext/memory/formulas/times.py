"""Seconds of one optimizer step, in parts: for choosing between plans; no promise.

All is estimated: rates of data sheets times an efficiency, bytes over the typical rate of a link. Lengths are the
job's, with `mean_completion_length` if given. The constants are fitted to published runs, which
`benchmarks/published.py` compares.
"""

from dataclasses import dataclass

from trl_ext.memory.formulas.activations import checkpoint_bytes, kv_copies, mode_of
from trl_ext.memory.formulas.engines import Engine, num_scoring_passes
from trl_ext.memory.formulas.generation import vllm_cache_tokens
from trl_ext.memory.formulas.peak import Setup
from trl_ext.memory.formulas.states import is_joint
from trl_ext.memory.models.shapes import active_params, kv_bytes_per_token, lm_params, quantised_weights
from trl_ext.memory.options import recompute_share

TOP_SHARE = 0.8  # of an A100's bf16 rate that multiplications of very wide matrices reach
WIDTH_OF_HALF = 700  # width of a model that reaches half of that: the rest of the time waits for memory
LORA_WIDTH_OF_HALF = 2450  # the same with adapters, whose many small operations wait most
FUSED_LORA_WIDTH_OF_HALF = 1500  # with Liger's layer kernels, which fuse many of them
# The share falls with this power of the card's rate: fast cards wait more. For cards slower than an A100, and faster:
# the second is fitted to four updates of a Qwen3-8B on an H100.
FALL, FAST_FALL = 0.6, 0.437
MOST_SHARE = 0.9  # upper limit for any card
A100_TFLOPS = 312
LAUNCH_S = 1.6e-3  # host time of a pass over one layer, for any number of tokens
ZERO3_LAUNCH_S = 3.6e-3  # the same if ZeRO-3 gathers the layer
ATTENTION_BACKWARD = 2.5  # attention's backward over its forward: it computes the scores again
UNPACKED = 0.04  # 4-bit weights that are unpacked in the time of reading a byte
READ_SHARE = 0.6  # share of the memory's rate that generation reaches
EAGER_LAYER_S = 8e-4  # a layer's part of one token step of transformers' generate, for any batch
# Compiled decoding over eager on an A100: 27.08 s and 6.54 s (huggingface/transformers, pull request 34923).
COMPILED = 4.1
VLLM_STEP_S = 3e-3  # of the scheduler, and of each GPU of a group, in one token step of vLLM
VLLM_ROW_S = 3e-5  # of each completion in that step, without its cache
PUSH_GB_S = 8.0  # rate at which vLLM takes new weights
ROLLOUT_S = 3.0  # rewards, tokenising and distributing the samples of a step
HIDDEN = 0.8  # largest share of sending gradients that a backward hides, with `overlap_comm` (estimated)
CPU_ADAM_PARAMS_S = 3e9  # parameters that a machine's cores update in a second
GB = 1e9


def step_seconds(setup: Setup) -> dict[str, float]:
    """Seconds of one optimizer step by part, without parts of 0. If samples are generated ahead, the step takes as
    long as the slower side, and `generation` is the time that training waits."""
    parts = {
        "generation": generation_seconds,
        "weight push": push_seconds,
        "scoring": scoring_seconds,
        "update": update_seconds,
        "communication": communication_seconds,
        "offload": offload_seconds,
    }
    seconds = {name: part(setup) for name, part in parts.items()}
    if setup.job.generation_ahead:
        seconds["generation"] = max(2 * seconds["generation"] - sum(seconds.values()), 0.0)
    return {name: took for name, took in seconds.items() if took}


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of an optimizer step on one GPU.

    Args:
        count: Rows.
        prompts: Prompts that are forwarded: rows of a group may share a prompt. 0 for pairs, which are counted whole.
        tokens: Tokens of a row after its prompt.
    """

    count: float
    prompts: float
    tokens: float


def _count_rows(setup: Setup) -> _Rows:
    """Count the rows of an optimizer step on one GPU. Packed rows of a group share one prompt over all their forwards,
    under FSDP within each forward."""
    job = setup.job
    rows = job.global_batch / setup.num_gpus
    if not job.generates:
        return _Rows(count=2 * rows, prompts=0.0, tokens=job.mean_tokens)
    mates = min(job.num_generations, job.per_device_train_batch_size) if job.fsdp else job.num_generations
    prompts = max(rows / mates, 1 / job.sequence_parallel) if job.packing else rows
    return _Rows(count=rows, prompts=prompts, tokens=job.mean_tokens - job.max_prompt_length)


def _tokens_per_gpu(setup: Setup) -> float:
    """Tokens of an optimizer step on one GPU."""
    rows = _count_rows(setup)
    return rows.prompts * setup.job.max_prompt_length + rows.count * rows.tokens


@dataclass(frozen=True, slots=True)
class _Flops:
    """Operations of a forward of an optimizer step's tokens on one GPU.

    Args:
        linear: 2 per token and layer weight.
        attention: 4 * L * nq * d per (query, key) pair.
        head: 2 per completion token and weight of the head.
    """

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum((self.linear, self.attention, self.head))


def _flops(setup: Setup) -> _Flops:
    shape, rows = setup.shape, _count_rows(setup)
    prompt = setup.job.max_prompt_length if rows.prompts else 0
    seen = rows.prompts * prompt**2 / 2 + rows.count * rows.tokens * (prompt + rows.tokens / 2)
    scored = rows.count * rows.tokens if rows.prompts else 0.0
    return _Flops(
        linear=2.0 * active_params(shape) * _tokens_per_gpu(setup),
        attention=4.0 * shape.num_layers * shape.q_width * seen,
        head=2.0 * shape.vocab * shape.hidden * scored,
    )


def _seconds(setup: Setup, flops: float, num_passes: float, half: float) -> float:
    """Seconds of passes over the layers: of the arithmetic, or of the host's launches if they take longer.

    Args:
        flops: Operations of all passes.
        num_passes: Forward, recomputation and backward: how often each layer runs.
        half: Width of a model that reaches half of the share.
    """
    shape, job, card = setup.shape, setup.job, setup.hardware.card
    width = shape.experts.intermediate if shape.experts else shape.hidden
    fall = FALL if card.bf16_tflops <= A100_TFLOPS else FAST_FALL
    share = TOP_SHARE * width / (width + half) * (A100_TFLOPS / card.bf16_tflops) ** fall
    share = min(share, MOST_SHARE)
    layer_passes = num_passes * _tokens_per_gpu(setup) / job.forward_tokens * shape.num_layers
    launching = layer_passes * (ZERO3_LAUNCH_S if job.zero_stage == 3 else LAUNCH_S)
    seconds = max(flops / (card.bf16_tflops * 1e12 * share), launching)
    if job.method == "qlora":
        unpacked = layer_passes * quantised_weights(shape) / shape.num_layers
        seconds += unpacked / (UNPACKED * card.bandwidth_gb_s * GB)
    return seconds


def update_seconds(setup: Setup) -> float:
    """Seconds of forward, backward (two forwards; one under LoRA, without weight gradients) and recomputation."""
    job = setup.job
    flops = _flops(setup)
    half = WIDTH_OF_HALF
    if job.uses_lora:
        half = FUSED_LORA_WIDTH_OF_HALF if job.packing and job.layer_kernels else LORA_WIDTH_OF_HALF
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    backward = 1 if job.uses_lora else 2
    layers = flops.linear * (1 + backward + recompute * recompute_share("linear", job))
    layers += flops.attention * (1 + ATTENTION_BACKWARD + recompute * recompute_share("attention", job))
    # The fused head computes its logits again in the backward.
    seconds = _seconds(setup, layers + flops.head * (2 + backward), 2 + recompute, half)
    if job.trainer == "ppo" and job.critic not in ("head", "none"):
        seconds += _seconds(setup, layers, 2 + recompute, half)
    return seconds


def scoring_seconds(setup: Setup) -> float:
    """Seconds of the scoring forwards: reference, reward model, values and old log-probabilities."""
    num_passes = setup.job.oversample * num_scoring_passes(setup.job, setup.num_gpus)
    return num_passes * _seconds(setup, _flops(setup).total, 1, WIDTH_OF_HALF)


def communication_seconds(setup: Setup) -> float:
    """Seconds of sending between the GPUs.

    All-reduce and ZeRO-1 send twice the gradients per step; ZeRO-2 sends them in every micro-batch, and the weights
    once; ZeRO-3 gathers all weights, also frozen ones, twice in every micro-batch and once in every scoring forward,
    and twice as often for two adapters of one backbone.
    """
    job, num_gpus = setup.job, setup.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = sum(_sent_bytes(setup, engine) for engine in setup.engines)
    if job.zero_stage == 3:
        copies = sum(copy.num_params * copy.value_bytes for copy in setup.copies)
        own = num_scoring_passes(job, num_gpus) * 2.0 * lm_params(setup.shape)
        sent += job.accumulation(num_gpus) * job.sequence_parallel * (copies + own)
    sent *= (num_gpus - 1) / num_gpus
    seconds = (sent + _shared_row_bytes(setup)) / (setup.hardware.gb_s * GB)
    if not job.overlap_comm:
        return seconds
    # Backwards hide a part of sending gradients (estimated); ZeRO-1 sends in the last backward of a step.
    num_sends = job.num_backwards(num_gpus)
    backward_s = update_seconds(setup) / 2 / num_sends
    trained = sum(engine.trained for engine in setup.engines)
    send_s = 2.0 * trained * (num_gpus - 1) / num_gpus / (setup.hardware.gb_s * GB)
    return seconds - min(send_s * HIDDEN, backward_s) * (num_sends if job.zero_stage == 2 else 1)


def _shared_row_bytes(setup: Setup) -> float:
    """Bytes that a GPU sends per optimizer step to GPUs that share its rows: queries, keys, values and output of every
    layer, in forwards, recomputation and backward. Nothing hides them."""
    shape, job = setup.shape, setup.job
    each = 4.0 * (shape.q_width + kv_copies(shape, job) * shape.kv_width) * shape.num_layers
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    passes = len(setup.engines) * (2 + recompute) + job.oversample * num_scoring_passes(job, setup.num_gpus)
    others = (job.sequence_parallel - 1) / job.sequence_parallel
    return others * passes * each * _tokens_per_gpu(setup)


def _sent_bytes(setup: Setup, engine: Engine) -> float:
    """Bytes sent per optimizer step to train one engine."""
    job, micro_steps = setup.job, setup.job.num_backwards(setup.num_gpus)
    gradients = 2.0 * engine.trained
    if job.zero_stage == 0:
        return 2 * gradients * (2 if mode_of(job).value.startswith("fp32") else 1)
    if job.zero_stage == 3:
        roles, here = 2 if is_joint(job) else 1, setup.hardware
        backward = here.gb_s / here.card.link.gb_s if job.zero_hpz_partition_size > 1 else 1.0  # within a machine
        return micro_steps * ((1 + backward) * roles * 2.0 * (engine.trained + engine.frozen) + gradients)
    return 2 * gradients if job.zero_stage == 1 else (micro_steps + 1) * gradients


def offload_seconds(setup: Setup) -> float:
    """Seconds of transfers to and from host memory, and of Adam on the CPU.

    Gradients go to the host in every micro-batch, weights come back once, with offload=all in every gather too.
    Offloaded checkpoints go in the forward and come back in the backward.
    """
    job, moved, seconds = setup.job, 0.0, 0.0
    if job.offload != "none":
        trained = sum(engine.trained for engine in setup.engines)
        whole = trained + sum(engine.frozen for engine in setup.engines)
        micro_steps = job.num_backwards(setup.num_gpus)
        moved = 2.0 * trained / setup.num_gpus * (micro_steps + 1)
        moved += 4.0 * whole / setup.num_gpus * micro_steps if job.offload == "all" else 0.0
        seconds = trained / setup.hardware.num_machines / CPU_ADAM_PARAMS_S
    if job.activation_offloading:
        moved += 2 * _tokens_per_gpu(setup) * checkpoint_bytes(setup.shape, job) * setup.shape.num_layers
    return seconds + moved / (setup.hardware.card.link.host_gb_s * GB)


def generation_seconds(setup: Setup, *, is_compiled: bool = False) -> float:
    """Seconds in which one GPU, or a group of GPUs with vLLM, generates and scores its completions of a step.

    Every token reads weights and cache. transformers' generate also launches every layer, compiled with a static cache
    COMPILED times as fast; vLLM generates as many completions at once as its cache holds, and replaces finished ones.
    Both wait for one of the longest length. Servers generate all completions while training waits; the time of servers
    on other machines is unknown.
    """
    job = setup.job
    is_server = job.vllm_mode == "server"
    if not job.generates or (is_server and not job.vllm_servers):
        return 0.0
    group = job.vllm_tensor_parallel_size if job.use_vllm else 1
    share = job.global_batch / job.vllm_servers if is_server else job.global_batch / setup.num_gpus * group
    wanted = job.oversample * share
    at_once = float(job.generated_at_once(setup.num_gpus))
    if job.use_vllm:
        cache = vllm_cache_tokens(setup.shape, setup.hardware.card, job)
        at_once = min(wanted, max(cache / job.mean_tokens, 1.0))
    mean = job.mean_tokens - job.max_prompt_length
    waited = job.max_completion_length - mean
    rounds = wanted / at_once
    token = _token_seconds(setup, group, EAGER_LAYER_S / COMPILED if is_compiled else EAGER_LAYER_S)
    tokens = rounds * mean + waited * (1 if job.use_vllm else rounds)
    return tokens * token.all_rows_s + rounds * mean * at_once * token.row_s + ROLLOUT_S


@dataclass(frozen=True, slots=True)
class _TokenStep:
    """Seconds of the generation of a token of each completion: together, and more for each completion."""

    all_rows_s: float
    row_s: float


def _token_seconds(setup: Setup, group: int, layer_s: float) -> _TokenStep:
    """Return the seconds of a token step of `group` GPUs, at least `layer_s` a layer without vLLM."""
    shape, job, card = setup.shape, setup.job, setup.hardware.card
    byte_s = 1 / (card.bandwidth_gb_s * GB * READ_SHARE) / group
    token_s = 2.0 * lm_params(shape) * byte_s
    read_tokens = (job.max_prompt_length + job.mean_tokens) / 2  # the prompt is in the cache from the first token on
    row_s = read_tokens * kv_bytes_per_token(shape) * byte_s
    if job.use_vllm:
        return _TokenStep(token_s + VLLM_STEP_S * (1 + group), row_s + VLLM_ROW_S)
    token_s = max(token_s, shape.num_layers * layer_s)
    if job.zero_stage == 3 and not job.gathers_to_generate:
        token_s += 2.0 * lm_params(shape) / (setup.hardware.gb_s * GB)
    return _TokenStep(token_s, row_s)


def push_seconds(setup: Setup) -> float:
    """Seconds in which vLLM takes new weights."""
    if not setup.job.use_vllm:
        return 0.0
    return 2.0 * lm_params(setup.shape) / (PUSH_GB_S * GB)
