"""Seconds of one optimizer step, in parts: for choosing between plans, not for promises.

Everything here is estimated: rates of data sheets times an efficiency, bytes over the typical rate of a link, all
sequences at their longest. What matters is the order of the plans, which ZeRO-3 over PCIe or a slow generation decide
by factors, not percents.
"""

from trl_ext.memory.formulas import engines as roles
from trl_ext.memory.formulas.activations import checkpoint_bytes, mode_of
from trl_ext.memory.formulas.generation import vllm_cache_tokens
from trl_ext.memory.formulas.phases import Case
from trl_ext.memory.formulas.states import Engine
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


def step_seconds(case: Case) -> dict[str, float]:
    """Seconds by part: generation, scoring, update, communication, offload."""
    parts = {"generation": generation_seconds(case), "scoring": scoring_seconds(case)}
    parts |= {"update": update_seconds(case), "communication": communication_seconds(case)}
    parts["offload"] = offload_seconds(case)
    return {name: value for name, value in parts.items() if value}


def forward_flops(case: Case, num_tokens: float, with_head: bool) -> float:
    """Operations of a forward: 2 a weight and token, causal attention 2 * L * nq * d * S a token, the head."""
    shape = case.shape
    layers = 2.0 * active_params(shape) + 2.0 * shape.num_layers * shape.q_width * case.job.sequence_tokens
    head = 2.0 * shape.vocab * shape.hidden if with_head else 0.0
    return num_tokens * layers + num_tokens * head * _scored_share(case)


def _scored_share(case: Case) -> float:
    return case.job.max_completion_length / case.job.sequence_tokens if case.job.generates else 0.0


def _tokens_per_gpu(case: Case) -> float:
    """Tokens of an optimizer step on one GPU."""
    sequences = case.job.global_batch / case.num_gpus * (1 if case.job.generates else 2)
    return sequences * case.job.sequence_tokens


def _rate(case: Case) -> float:
    """Operations a second."""
    tokens = case.job.forward_tokens
    rate = case.hardware.card.bf16_tflops * 1e12 * UTILISATION * tokens / (tokens + TOKENS_OF_HALF_SPEED)
    return rate / QLORA_FACTOR if case.job.method == "qlora" else rate


def update_seconds(case: Case) -> float:
    """Forward, backward (twice a forward; once under LoRA, which has no weight gradients) and the recompute."""
    job = case.job
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    passes = 1 + (1 if job.uses_lora else 2) + recompute
    flops = forward_flops(case, _tokens_per_gpu(case), job.generates)
    if job.trainer == "ppo" and job.critic != "head":
        flops += forward_flops(case, _tokens_per_gpu(case), False)
    return passes * flops / _rate(case)


def scoring_seconds(case: Case) -> float:
    """Reference, reward model, values and old log-probabilities, a forward each."""
    passes = roles.num_scoring_passes(case.job)
    return passes * forward_flops(case, _tokens_per_gpu(case), True) / _rate(case)


def communication_seconds(case: Case) -> float:
    """Between the GPUs. All-reduce and ZeRO-1 send twice the gradients a step; ZeRO-2 sends them in every micro-batch,
    and the weights once; ZeRO-3 gathers all weights, frozen ones too, twice in every micro-batch and once in every
    scoring forward."""
    job, num_gpus = case.job, case.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = sum(_sent_bytes(case, engine) for engine in case.engines)
    if job.zero_stage == 3:
        copies = sum(copy.num_params * copy.value_bytes for copy in case.copies)
        own = roles.num_scoring_passes(job) * 2.0 * lm_params(case.shape)
        sent += job.accumulation(num_gpus) * (copies + own)
    link = case.hardware.card.link
    exposed = EXPOSED_NVLINK if link.is_fast and job.zero_stage == 3 else 1.0
    return exposed * sent * (num_gpus - 1) / num_gpus / (link.gb_s * GB)


def _sent_bytes(case: Case, engine: Engine) -> float:
    job, micro_steps = case.job, case.job.num_backwards(case.num_gpus)
    gradients = 2.0 * engine.trained
    if job.zero_stage == 0:
        return 2 * gradients * (2 if mode_of(job).value.startswith("fp32") else 1)
    if job.zero_stage == 3:
        return micro_steps * (2 * 2.0 * (engine.trained + engine.frozen) + gradients)
    return 2 * gradients if job.zero_stage == 1 else (micro_steps + 1) * gradients


def offload_seconds(case: Case) -> float:
    """Gradients down in every micro-batch, weights up once, Adam on the CPU; with offload=all every gather comes up
    from host memory as well."""
    job = case.job
    if job.offload == "none":
        return _activation_offload_seconds(case)
    trained = sum(engine.trained for engine in case.engines)
    whole = trained + sum(engine.frozen for engine in case.engines)
    micro_steps = job.num_backwards(case.num_gpus)
    moved = 2.0 * trained / case.num_gpus * (micro_steps + 1)
    if job.offload == "all":
        moved += 2 * 2.0 * whole / case.num_gpus * micro_steps
    seconds = moved / (case.hardware.card.link.host_gb_s * GB) + trained / CPU_ADAM_PARAMS_S
    return seconds + _activation_offload_seconds(case)


def _activation_offload_seconds(case: Case) -> float:
    """Checkpoints go down in the forward and come up in the backward."""
    if not case.job.activation_offloading:
        return 0.0
    each = checkpoint_bytes(case.shape, case.job) * case.shape.num_layers
    return 2 * _tokens_per_gpu(case) * each / (case.hardware.card.link.host_gb_s * GB)


def generation_seconds(case: Case) -> float:
    """All completions of an optimizer step on one GPU."""
    if not case.job.generates:
        return 0.0
    return _vllm_seconds(case) if case.job.use_vllm else _generate_seconds(case)


def _generate_seconds(case: Case) -> float:
    """transformers' generate: every layer costs its launch, weights and cache are read for every token."""
    shape, job, card = case.shape, case.job, case.hardware.card
    at_once = job.generated_at_once(case.num_gpus)
    calls = job.global_batch / case.num_gpus / at_once
    read = 2.0 * lm_params(shape) + at_once * (job.sequence_tokens / 2) * kv_bytes_per_token(shape)
    token_s = max(read / (card.bandwidth_gb_s * GB * READ_SHARE), shape.num_layers * EAGER_LAYER_S)
    if job.zero_stage == 3 and not job.ds3_gather_for_generation:
        token_s += 2.0 * lm_params(shape) / (card.link.gb_s * GB)
    return calls * job.max_completion_length * token_s


def _vllm_seconds(case: Case) -> float:
    """vLLM: as many completions at once as its cache holds."""
    shape, job, card = case.shape, case.job, case.hardware.card
    group = job.vllm_tensor_parallel_size
    wanted = job.global_batch / case.num_gpus * group
    held = max(vllm_cache_tokens(shape, card, job) / job.sequence_tokens, 1.0)
    at_once = min(wanted, held)
    read = 2.0 * lm_params(shape) + at_once * (job.sequence_tokens / 2) * kv_bytes_per_token(shape)
    token_s = read / group / (card.bandwidth_gb_s * GB * READ_SHARE) + VLLM_STEP_S * group
    return wanted / at_once * job.max_completion_length * token_s
