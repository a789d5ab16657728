"""Seconds of one optimizer step, in parts: for choosing between plans, not for promises.

Everything here is estimated: rates of data sheets times an efficiency, bytes over the typical rate of a link, all
sequences at their longest. Only the order of the plans matters, which ZeRO-3 over PCIe or a slow generation decide by
factors, not percents.
"""

from trl_ext.memory.formulas.activations import checkpoint_bytes, kv_copies, mode_of
from trl_ext.memory.formulas.engines import Engine, num_scoring_passes
from trl_ext.memory.formulas.generation import vllm_cache_tokens
from trl_ext.memory.formulas.peak import Setup
from trl_ext.memory.formulas.states import is_joint
from trl_ext.memory.models.shapes import active_params, kv_bytes_per_token, lm_params

UTILISATION = 0.45  # share of the bf16 rate that long forwards and backwards reach
TOKENS_OF_HALF_SPEED = 512  # a forward of so few tokens reaches half of that
READ_SHARE = 0.7  # share of the memory's rate that generation reaches
EAGER_LAYER_S = 6e-4  # a layer's share of one token step of transformers' generate, whatever the batch
VLLM_STEP_S = 2e-3  # the scheduler's share of one token step of vLLM
CPU_ADAM_PARAMS_S = 3e9  # parameters that a machine's cores update in a second
QLORA_FACTOR = 1.3  # weights are unpacked in every forward
EXPOSED_NVLINK = 0.5  # share of ZeRO-3's gathers that computation does not hide; over PCIe it hides next to nothing
GB = 1e9


def step_seconds(setup: Setup) -> dict[str, float]:
    """Seconds of one optimizer step by part, without the parts that take none.

    Where samples are generated ahead, the step takes as long as the slower side, and `generation` is how long training
    waits.
    """
    parts = {
        "generation": generation_seconds,
        "scoring": scoring_seconds,
        "update": update_seconds,
        "communication": communication_seconds,
        "offload": offload_seconds,
    }
    seconds = {name: part(setup) for name, part in parts.items()}
    if setup.job.generation_ahead:
        seconds["generation"] = max(2 * seconds["generation"] - sum(seconds.values()), 0.0)
    return {name: took for name, took in seconds.items() if took}


def forward_flops(setup: Setup, num_tokens: float, *, with_head: bool) -> float:
    """Operations of a forward: 2 a weight and token, causal attention 2 * L * nq * d * S a token, the head."""
    shape, job = setup.shape, setup.job
    each = 2.0 * active_params(shape) + 2.0 * shape.num_layers * shape.q_width * job.sequence_tokens
    if with_head and job.generates:
        each += 2.0 * shape.vocab * shape.hidden * job.max_completion_length / job.sequence_tokens
    return num_tokens * each


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
    """Seconds of forward, backward (twice a forward; once under LoRA, without weight gradients) and recompute."""
    job = setup.job
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    passes = 1 + (1 if job.uses_lora else 2) + recompute
    flops = forward_flops(setup, _tokens_per_gpu(setup), with_head=True)
    if job.trainer == "ppo" and job.critic not in ("head", "none"):
        flops += forward_flops(setup, _tokens_per_gpu(setup), with_head=False)
    return passes * flops / _rate(setup)


def scoring_seconds(setup: Setup) -> float:
    """Seconds of a forward each for reference, reward model, values and old log-probabilities."""
    passes = num_scoring_passes(setup.job)
    tokens = setup.job.oversample * _tokens_per_gpu(setup)
    return passes * forward_flops(setup, tokens, with_head=True) / _rate(setup)


def communication_seconds(setup: Setup) -> float:
    """Seconds of sending between the GPUs.

    All-reduce and ZeRO-1 send twice the gradients a step; ZeRO-2 sends them in every micro-batch, and the weights
    once; ZeRO-3 gathers all weights, frozen ones too, twice in every micro-batch and once in every scoring forward;
    for two adapters of one backbone it gathers them twice as often.
    """
    job, num_gpus = setup.job, setup.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = sum(_sent_bytes(setup, engine) for engine in setup.engines)
    if job.zero_stage == 3:
        copies = sum(copy.num_params * copy.value_bytes for copy in setup.copies)
        own = num_scoring_passes(job) * 2.0 * lm_params(setup.shape)
        sent += job.accumulation(num_gpus) * job.sequence_parallel * (copies + own)
    is_fast = setup.hardware.card.link.is_fast and setup.hardware.num_machines == 1
    exposed = EXPOSED_NVLINK if is_fast and job.zero_stage == 3 else 1.0
    sent *= exposed * (num_gpus - 1) / num_gpus
    return (sent + _shared_row_bytes(setup)) / (setup.hardware.gb_s * GB)


def _shared_row_bytes(setup: Setup) -> float:
    """Bytes that a GPU sends in an optimizer step to those that share its rows: queries, keys, values and output of
    every layer, in forwards, recomputation and backward. Nothing hides them."""
    shape, job = setup.shape, setup.job
    each = 4.0 * (shape.q_width + kv_copies(shape, job) * shape.kv_width) * shape.num_layers
    recompute = 1 / job.checkpoint_every if job.checkpoint_every else 0.0
    passes = len(setup.engines) * (2 + recompute) + job.oversample * num_scoring_passes(job)
    others = (job.sequence_parallel - 1) / job.sequence_parallel
    return others * passes * each * _tokens_per_gpu(setup)


def _sent_bytes(setup: Setup, engine: Engine) -> float:
    """Bytes that training one engine sends in an optimizer step."""
    job, micro_steps = setup.job, setup.job.num_backwards(setup.num_gpus)
    gradients = 2.0 * engine.trained
    if job.zero_stage == 0:
        return 2 * gradients * (2 if mode_of(job).value.startswith("fp32") else 1)
    if job.zero_stage == 3:
        roles = 2 if is_joint(job) else 1
        return micro_steps * (2 * roles * 2.0 * (engine.trained + engine.frozen) + gradients)
    return 2 * gradients if job.zero_stage == 1 else (micro_steps + 1) * gradients


def offload_seconds(setup: Setup) -> float:
    """Seconds of transfers to and from host memory, and of Adam on the CPU.

    Gradients go down in every micro-batch, weights come up once, with offload=all in every gather as well; offloaded
    checkpoints go down in the forward and come up in the backward.
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


def generation_seconds(setup: Setup) -> float:
    """Seconds in which one GPU, or a group of GPUs with vLLM, generates its completions of an optimizer step.

    Weights and cache are read for every token. transformers' generate launches every layer besides; vLLM generates as
    many completions at once as its cache holds. Servers generate all of them, while training waits; elsewhere their
    time is not known.
    """
    shape, job, card = setup.shape, setup.job, setup.hardware.card
    is_server = job.vllm_mode == "server"
    if not job.generates or (is_server and not job.vllm_servers):
        return 0.0
    group = job.vllm_tensor_parallel_size if job.use_vllm else 1
    share = job.global_batch / job.vllm_servers if is_server else job.global_batch / setup.num_gpus * group
    wanted = job.oversample * share
    if job.use_vllm:
        at_once = min(wanted, max(vllm_cache_tokens(shape, card, job) / job.sequence_tokens, 1.0))
    else:
        at_once = job.generated_at_once(setup.num_gpus)
    read = 2.0 * lm_params(shape) + at_once * (job.sequence_tokens / 2) * kv_bytes_per_token(shape)
    token_s = read / group / (card.bandwidth_gb_s * GB * READ_SHARE)
    if job.use_vllm:
        token_s += VLLM_STEP_S * group
    else:
        token_s = max(token_s, shape.num_layers * EAGER_LAYER_S)
        if job.zero_stage == 3 and not job.gathers_to_generate:
            token_s += 2.0 * lm_params(shape) / (setup.hardware.gb_s * GB)
    return wanted / at_once * job.max_completion_length * token_s
