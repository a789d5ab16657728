"""Seconds of one optimizer step, in parts: for choosing between plans, not for promises.

Everything here is estimated: rates of data sheets times an efficiency, bytes over the typical rate of a link, all
sequences at their longest. What matters is the order of the plans, which ZeRO-3 over PCIe or a slow generation decide
by factors, not percents.
"""

from trl_ext.memory.formulas.activations import checkpoint_bytes, mode_of
from trl_ext.memory.formulas.engines import Engine, num_scoring_passes
from trl_ext.memory.formulas.generation import vllm_cache_tokens
from trl_ext.memory.formulas.peak import Setup
from trl_ext.memory.models.shapes import active_params, kv_bytes_per_token, lm_params

UTILISATION = 0.45  # of the bf16 rate, in long forwards and backwards
TOKENS_OF_HALF_SPEED = 512  # a forward of so few tokens reaches half of that
READ_SHARE = 0.7  # of the memory's rate, while generating
EAGER_LAYER_S = 6e-4  # a layer's share of one token step of transformers' generate, whatever the batch
VLLM_STEP_S = 2e-3  # the scheduler's share of one token step of vLLM
CPU_ADAM_PARAMS_S = 3e9  # parameters that a machine's cores update in a second
QLORA_FACTOR = 1.3  # weights are unpacked in every forward
EXPOSED_NVLINK = 0.5  # of ZeRO-3's gathers, what computation does not hide; over PCIe it hides next to nothing
GB = 1e9


def step_seconds(setup: Setup) -> dict[str, float]:
    """Seconds by part: generation, scoring, update, communication, offload."""
    parts = {"generation": generation_seconds(setup), "scoring": scoring_seconds(setup)}
    parts |= {"update": update_seconds(setup), "communication": communication_seconds(setup)}
    parts["offload"] = offload_seconds(setup)
    return {name: value for name, value in parts.items() if value}


def forward_flops(setup: Setup, num_tokens: float, with_head: bool) -> float:
    """Operations of a forward: 2 a weight and token, causal attention 2 * L * nq * d * S a token, the head."""
    shape = setup.shape
    layers = 2.0 * active_params(shape) + 2.0 * shape.num_layers * shape.q_width * setup.job.sequence_tokens
    head = 2.0 * shape.vocab * shape.hidden if with_head else 0.0
    return num_tokens * layers + num_tokens * head * _scored_share(setup)


def _scored_share(setup: Setup) -> float:
    return setup.job.max_completion_length / setup.job.sequence_tokens if setup.job.generates else 0.0


def _tokens_per_gpu(setup: Setup) -> float:
    """Tokens of an optimizer step on one GPU."""
    sequences = setup.job.global_batch / setup.num_gpus * (1 if setup.job.generates else 2)
    return sequences * setup.job.sequence_tokens


def _rate(setup: Setup) -> float:
    """Operations a second."""
    tokens = setup.job.forward_tokens
    rate = setup.hardware.card.bf16_tflops * 1e12 * UTILISATION * tokens / (tokens + TOKENS_OF_HALF_SPEED)
    return rate / QLORA_FACTOR if setup.job.method == "qlora" else rate


def update_seconds(setup: Setup) -> float:
    """Forward, backward (twice a forward; once under LoRA, which has no weight gradients) and the recompute."""
    job = setup.job
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    passes = 1 + (1 if job.uses_lora else 2) + recompute
    flops = forward_flops(setup, _tokens_per_gpu(setup), job.generates)
    if job.trainer == "ppo" and job.critic != "head":
        flops += forward_flops(setup, _tokens_per_gpu(setup), False)
    return passes * flops / _rate(setup)


def scoring_seconds(setup: Setup) -> float:
    """Reference, reward model, values and old log-probabilities, a forward each."""
    passes = num_scoring_passes(setup.job)
    return passes * forward_flops(setup, _tokens_per_gpu(setup), True) / _rate(setup)


def communication_seconds(setup: Setup) -> float:
    """Between the GPUs. All-reduce and ZeRO-1 send twice the gradients a step; ZeRO-2 sends them in every micro-batch,
    and the weights once; ZeRO-3 gathers all weights, frozen ones too, twice in every micro-batch and once in every
    scoring forward."""
    job, num_gpus = setup.job, setup.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = sum(_sent_bytes(setup, engine) for engine in setup.engines)
    if job.zero_stage == 3:
        copies = sum(copy.num_params * copy.value_bytes for copy in setup.copies)
        own = num_scoring_passes(job) * 2.0 * lm_params(setup.shape)
        sent += job.accumulation(num_gpus) * (copies + own)
    link = setup.hardware.card.link
    exposed = EXPOSED_NVLINK if link.is_fast and job.zero_stage == 3 else 1.0
    return exposed * sent * (num_gpus - 1) / num_gpus / (link.gb_s * GB)


def _sent_bytes(setup: Setup, engine: Engine) -> float:
    job, micro_steps = setup.job, setup.job.num_backwards(setup.num_gpus)
    gradients = 2.0 * engine.trained
    if job.zero_stage == 0:
        return 2 * gradients * (2 if mode_of(job).value.startswith("fp32") else 1)
    if job.zero_stage == 3:
        return micro_steps * (2 * 2.0 * (engine.trained + engine.frozen) + gradients)
    return 2 * gradients if job.zero_stage == 1 else (micro_steps + 1) * gradients


def offload_seconds(setup: Setup) -> float:
    """Gradients down in every micro-batch, weights up once, Adam on the CPU; with offload=all every gather comes up
    from host memory as well."""
    job = setup.job
    if job.offload == "none":
        return _activation_offload_seconds(setup)
    trained = sum(engine.trained for engine in setup.engines)
    whole = trained + sum(engine.frozen for engine in setup.engines)
    micro_steps = job.num_backwards(setup.num_gpus)
    moved = 2.0 * trained / setup.num_gpus * (micro_steps + 1)
    if job.offload == "all":
        moved += 2 * 2.0 * whole / setup.num_gpus * micro_steps
    seconds = moved / (setup.hardware.card.link.host_gb_s * GB) + trained / CPU_ADAM_PARAMS_S
    return seconds + _activation_offload_seconds(setup)


def _activation_offload_seconds(setup: Setup) -> float:
    """Checkpoints go down in the forward and come up in the backward."""
    if not setup.job.activation_offloading:
        return 0.0
    each = checkpoint_bytes(setup.shape, setup.job) * setup.shape.num_layers
    return 2 * _tokens_per_gpu(setup) * each / (setup.hardware.card.link.host_gb_s * GB)


def generation_seconds(setup: Setup) -> float:
    """All completions of an optimizer step on one GPU."""
    if not setup.job.generates:
        return 0.0
    return _vllm_seconds(setup) if setup.job.use_vllm else _generate_seconds(setup)


def _generate_seconds(setup: Setup) -> float:
    """transformers' generate: every layer costs its launch, weights and cache are read for every token."""
    shape, job, card = setup.shape, setup.job, setup.hardware.card
    at_once = job.generated_at_once(setup.num_gpus)
    calls = job.global_batch / setup.num_gpus / at_once
    read = 2.0 * lm_params(shape) + at_once * (job.sequence_tokens / 2) * kv_bytes_per_token(shape)
    token_s = max(read / (card.bandwidth_gb_s * GB * READ_SHARE), shape.num_layers * EAGER_LAYER_S)
    if job.zero_stage == 3 and not job.ds3_gather_for_generation:
        token_s += 2.0 * lm_params(shape) / (card.link.gb_s * GB)
    return calls * job.max_completion_length * token_s


def _vllm_seconds(setup: Setup) -> float:
    """vLLM: as many completions at once as its cache holds."""
    shape, job, card = setup.shape, setup.job, setup.hardware.card
    group = job.vllm_tensor_parallel_size
    wanted = job.global_batch / setup.num_gpus * group
    held = max(vllm_cache_tokens(shape, card, job) / job.sequence_tokens, 1.0)
    at_once = min(wanted, held)
    read = 2.0 * lm_params(shape) + at_once * (job.sequence_tokens / 2) * kv_bytes_per_token(shape)
    token_s = read / group / (card.bandwidth_gb_s * GB * READ_SHARE) + VLLM_STEP_S * group
    return wanted / at_once * job.max_completion_length * token_s
