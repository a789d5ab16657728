"""Bytes that a forward and its backward hold per token and layer, for the eager code of transformers.

A norm saves its input in fp32 and its scaled output (6H + 2H); attention its queries, output, keys, values and
log-sum-exp; the gated MLP four tensors of its width. Attention is of the flash type, without T x T matrices, except in
the families of `SCORES`. Counted on fake tensors in transformers 5.23: Llama, Mistral, Qwen2, Qwen3, Phi-3 and Gemma
agree to 0.1 %, Gemma 3 at the widths of its 1B model to 1 %; Gemma 2, OLMo 2 and mixtures have a fitted remainder and
agree within a few percent.

There are four modes (`Mode`): bf16 weights (DeepSpeed, all weights), fp32 weights under autocast (DDP, all weights),
bf16 adapters (DeepSpeed), fp32 adapters under autocast (DDP).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import gcd
from typing import NamedTuple

from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape, lora_linears, num_dense_layers, quantised_weights
from trl_ext.memory.options import layer_bytes

TOKEN_CHUNK, VOCAB_CHUNK = 4096, 32768  # size of the tiles in which TRL's fused head computes logits
LOGIT_BYTES = 14  # per token and vocabulary entry if a trainer computes full logits: fitted to published runs


class Mode(Enum):
    """The dtypes of weights and arithmetic, with all weights trained or adapters."""

    BF16 = "bf16 weights"
    AUTOCAST = "fp32 weights, bf16 autocast"
    LORA_BF16 = "bf16 adapters"
    LORA_AUTOCAST = "fp32 adapters, bf16 autocast"


def mode_of(job: Job) -> Mode:
    """Return a job's mode: DeepSpeed's bf16 engine turns autocast off and casts adapters to bf16."""
    if job.uses_lora:
        return Mode.LORA_BF16 if job.zero_stage or job.method == "qlora" else Mode.LORA_AUTOCAST
    return Mode.BF16 if job.zero_stage or job.dtype == "bfloat16" else Mode.AUTOCAST


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes that a family holds beyond a Llama, in multiples of H per token and layer.

    Args:
        saved: Multiples saved for backward, by mode; 0 for modes left out.
        peak: Multiples above the saved bytes, at the peak of a layer's backward, by mode.
    """

    saved: Mapping[Mode, float] = field(default_factory=dict)
    peak: Mapping[Mode, float] = field(default_factory=dict)


# Projections that read the same input.
_INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def _by_training(trained: float, frozen: float) -> dict[Mode, float]:
    """Return one number for training all weights and one for adapters, with and without autocast."""
    return {mode: frozen if mode.name.startswith("LORA") else trained for mode in Mode}


# Norms of Gemma and gpt-oss multiply in fp32 and keep it; Gemma 2 and 3 have two more norms in a layer, after the
# blocks. Phi-3 casts the input of a fused projection once, a Llama three times for attention and twice for the MLP;
# with adapters its peak is where the fused projection of twice the width adds up.
EXTRAS = {
    "gemma": Extra(_by_training(4, 0)),
    "gemma2": Extra(_by_training(20, 8), _by_training(6, 6)),
    "gemma3_text": Extra(
        _by_training(20, 8), {**_by_training(6, 6), Mode.LORA_BF16: -4, Mode.LORA_AUTOCAST: 2.4}
    ),  # fitted at the widths of the 1B model, whose peak is in the norm after the MLP
    "olmo2": Extra(_by_training(4, 1), _by_training(4.5, 4.5)),
    "gpt_oss": Extra(_by_training(4, 0)),
    "phi3": Extra({Mode.AUTOCAST: -6, Mode.LORA_AUTOCAST: -6}, {Mode.LORA_BF16: 4}),
}


@dataclass(frozen=True, slots=True)
class Scores:
    """Bytes of the T x T matrices of eager attention for each pair of a query and a key.

    Args:
        saved: Per head, saved for backward.
        backward: Per head, at the peak of a layer's recomputation and backward.
        forward: Per head, at the peak of a forward without gradients.
        masks: Of the masks, which layers and heads share.
    """

    saved: int = 0
    backward: int = 0
    forward: int = 0
    masks: int = 1  # torch's sdpa takes booleans


# With bf16 and with fp32 weights, counted in small layers in transformers 5.24. Gemma 2 saves the capped scores, the
# float32 softmax and its bf16 copy; gpt-oss computes the softmax in the dtype of the mask. Both have a mask for the
# layers with a window and another for the other layers.
SCORES = {
    "gemma2": (Scores(saved=8, backward=14, forward=10, masks=4), Scores(saved=8, backward=14, forward=8, masks=8)),
    "gpt_oss": (Scores(saved=2, backward=6, forward=6, masks=4), Scores(saved=6, backward=14, forward=14, masks=8)),
}


def scores_of(shape: ModelShape, job: Job) -> Scores:
    """Return the bytes of a family's T x T matrices, all 0 except for the mask if its attention is not eager."""
    return SCORES.get(shape.family, (Scores(), Scores()))[has_fp32_weights(job)]


def eager_work_bytes(shape: ModelShape, job: Job, per_head: int, num_keys: int) -> float:
    """Bytes per token at a peak of eager attention: 16H + 8*nq*d next to the scores; 0 if attention is not eager.

    Args:
        shape: The model's sizes.
        job: The settings.
        per_head: Bytes of scores for each head and key, of `Scores`.
        num_keys: Tokens of the sequence.
    """
    scores = (shape.num_heads * per_head + scores_of(shape, job).masks) * num_keys
    return shape.is_eager * (16.0 * shape.hidden + 8.0 * shape.q_width + scores)


def mlp_bytes(shape: ModelShape) -> float:
    """Bytes per token that the MLP saves, averaged over the layers: gate, its activation, up, product, 8I. In a
    mixture: k experts per token, each with its input and output, 8I + 4H + 34, and 4 bytes of router per expert. The
    experts of gpt-oss, which clamp gate and up, save 14I + 4H + 44."""
    dense = 8.0 * shape.intermediate
    experts = shape.experts
    if experts is None:
        return dense
    each = (8 + 6 * experts.bias) * experts.intermediate + 4 * shape.hidden + 34 + 10 * experts.bias
    sparse = experts.per_token * each + 4 * experts.num
    sparse += 8 * experts.shared_intermediate
    share = num_dense_layers(shape) / shape.num_layers
    return share * dense + (1 - share) * sparse


def mlp_width(shape: ModelShape) -> int:
    """Values per token between the MLP's projections, in the widest layer."""
    experts = shape.experts
    if experts is None:
        return shape.intermediate
    sparse = experts.per_token * experts.intermediate + experts.shared_intermediate
    return max(sparse, shape.intermediate) if num_dense_layers(shape) else sparse


def attention_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes per token that attention saves: queries, output, keys, values, log-sum-exp, norms on queries and keys.

    If GPUs share a row, its kernel has all tokens of some heads, or, if heads do not divide by the GPUs, some queries
    and all keys: the same number of bytes, except keys and values that are repeated.
    """
    heads = shape.num_heads + shape.num_kv_heads
    widths = shape.q_width + shape.kv_width
    saved = 4.0 * (shape.q_width + kv_copies(shape, job) * shape.kv_width) + 4 * shape.num_heads + 8
    if shape.qk_norm:
        saved += (4 if job.uses_lora else 6) * widths + 4 * heads
    if job.sequence_parallel > 1:
        # The output returned from the other GPUs is kept as the input of o_proj; dropout keeps a copy instead. For
        # whole rows attention has saved it already.
        adapted = lora_linears(shape, job.lora_target_modules) if job.uses_lora and not _drops(job) else ()
        is_kept = not job.uses_lora or any(linear.name == "o_proj" for linear, _ in adapted)
        saved += 2.0 * shape.q_width if is_kept else 0.0
    return saved


def kv_copies(shape: ModelShape, job: Job) -> int:
    """Number of repetitions of keys and values for the GPUs that share a row: to divide their heads, and to have all
    of them with each part of the queries. 8 GPUs, 28 heads and 4 key heads: once per 4 GPUs, 2."""
    return job.sequence_parallel // gcd(job.sequence_parallel, shape.num_kv_heads)


def saved_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes per token that one layer saves without checkpointing.

    bf16 weights: 16H + 4*nq*d + 4*nkv*d + 8I + 4*nq + 8. Llama-3-8B: 200,840. Autocast adds 10H for the fp32 residual
    stream. Under LoRA the frozen norms save 4H less, and each adapter adds its 2r.
    """
    mode, hidden = mode_of(job), shape.hidden
    extra = EXTRAS.get(shape.family, Extra())
    saved = 16 * hidden + attention_bytes(shape, job) + mlp_bytes(shape)
    saved += extra.saved.get(mode, 0.0) * hidden
    saved += {Mode.BF16: 0, Mode.AUTOCAST: 10, Mode.LORA_BF16: -4, Mode.LORA_AUTOCAST: 4}[mode] * hidden
    return saved + (lora_bytes(shape, job) if job.uses_lora else 0) + padding_bytes(shape, job)


def padding_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes per token that a layer saves beyond packed attention: keys and values repeated for every query head, and
    torch's sdpa the mask [B, 1, S, S] in the queries' dtype, 2S (estimated), or eager attention its scores.
    Gemma-2-9b at 4,096 tokens: 524,288 of scores."""
    if job.packing:
        return 0.0
    kept = shape.num_heads * scores_of(shape, job).saved if shape.is_eager else 2
    return 4.0 * (shape.q_width - shape.kv_width) + kept * job.sequence_tokens


def lora_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes per token that the adapters of a layer save: 2r each, and with dropout a mask and a copy of each input.

    Mask and copy take 3 bytes per value, instead of 2 for inputs, which q, k and v share, as gate and up do. Attention
    keeps the input of o anyway. Estimated from CUDA's fused dropout.
    """
    linears = [linear for linear, _ in lora_linears(shape, job.lora_target_modules)]
    saved = 2.0 * job.lora_r * len(linears)
    if _drops(job):
        replaced = {_INPUTS.get(linear.name, linear.name): linear.fan_in for linear in linears}
        replaced.pop("o_proj", None)
        saved += 3 * sum(linear.fan_in for linear in linears) - 2 * sum(replaced.values())
    return saved


def _drops(job: Job) -> bool:
    """Return True if adapters use dropout: the other trainers' `disable_dropout` is True by default."""
    return bool(job.lora_dropout) and job.trainer == "grpo"


def mask_bytes(shape: ModelShape, job: Job) -> int:
    """Bytes per token of the mask that all layers of a padded batch share: S booleans (estimated), or eager
    attention's."""
    return 0 if job.packing else scores_of(shape, job).masks * job.sequence_tokens


def checkpoint_bytes(shape: ModelShape, job: Job) -> int:
    """Bytes per token that a checkpointed layer keeps: its input, 2H, or 4H if the residual stream is fp32, and what
    the job's options keep."""
    return (4 if has_fp32_weights(job) else 2) * shape.hidden + layer_bytes("checkpoints", shape, job)


def has_fp32_weights(job: Job) -> bool:
    """Return True if weights stay in float32 and autocast casts them at each use: TRL's default without DeepSpeed."""
    return job.dtype == "float32" and not job.zero_stage and job.method != "qlora"


def cast_weight_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes of the bf16 copies of fp32 weights that the graph keeps: of the layer in backward, and of every layer
    without checkpointing. Llama-3-8B, checkpointed: 0.41 GiB."""
    if not has_fp32_weights(job):
        return 0.0
    every, num_layers = job.checkpoint_every, shape.num_layers
    num_kept = num_layers - (-(-num_layers // every) if every else 0)
    return 2.0 * quantised_weights(shape) / num_layers * max(num_kept, 1)


def work_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes per token that a layer holds at the peak of its backward, in the MLP, or in eager attention. Llama-3-8B:
    266,904 in bf16, 300,184 under autocast, 345,616 with fp32 adapters of rank 64."""
    hidden, width, head, mode = shape.hidden, mlp_width(shape), shape.head_dim, mode_of(job)
    above = {
        Mode.BF16: 2 * hidden + 4 * width + 4 * head + 16,
        Mode.AUTOCAST: 4 * width + 8 * head + 16,
        Mode.LORA_BF16: 2 * hidden + 4 * width + 4 * head + 16,
        Mode.LORA_AUTOCAST: 10 * hidden + 6 * width + 4 * head + 8,
    }[mode]
    extra = EXTRAS.get(shape.family, Extra()).peak.get(mode, 0.0) * hidden
    in_mlp = saved_bytes(shape, job) + above + mask_bytes(shape, job) + extra
    in_attention = eager_work_bytes(shape, job, scores_of(shape, job).backward, job.sequence_tokens)
    return max(in_mlp, in_attention) + layer_bytes("layer work", shape, job)


class HeldBytes(NamedTuple):
    """Bytes per token of checkpoints, and of layers without checkpointing."""

    checkpoints: float
    saved_layers: float


def held_bytes(shape: ModelShape, job: Job) -> HeldBytes:
    """Bytes per token at the start of backward. Every n-th layer is checkpointed, L/n of them rounded up."""
    every, num_layers = job.checkpoint_every, shape.num_layers
    num_checkpointed = -(-num_layers // every) if every else 0
    saved = (num_layers - num_checkpointed) * saved_bytes(shape, job)
    return HeldBytes(float(num_checkpointed * checkpoint_bytes(shape, job)), saved)


def kept_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes of a prompt's prefix cache for several forwards, without its activations, which count in each forward: the
    keys and values of all layers, 4*nkv*d per token, and the same for their gradients. Without checkpointing the
    activations hold the keys and values, and each forward has a copy of them."""
    return 8.0 * shape.num_layers * kv_copies(shape, job) * shape.kv_width * job.kept_tokens


def no_grad_bytes(shape: ModelShape, job: Job, num_keys: int) -> float:
    """Bytes per token of a forward without gradients of sequences of `num_keys` tokens, one layer at a time: 6I + 8H +
    4d with bf16 weights, or eager attention's. A fused gate and up projection stays together with its halves, 2I more;
    under LoRA its sum exists too, 4I more."""
    mlps = (8 if job.uses_lora else 6) + ((4 if job.uses_lora else 2) if shape.fused else 0)
    hiddens, heads = {
        Mode.BF16: (8, 4),
        Mode.AUTOCAST: (16, 8),
        Mode.LORA_BF16: (8, 4),
        Mode.LORA_AUTOCAST: (12, 4),
    }[mode_of(job)]
    in_mlp = mlps * mlp_width(shape) + hiddens * shape.hidden + heads * shape.head_dim + 3 * mask_bytes(shape, job)
    return max(in_mlp, eager_work_bytes(shape, job, scores_of(shape, job).forward, num_keys))


def cast_cache_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes of the bf16 copies of trained fp32 weights that autocast keeps until its block, the whole forward, ends.
    Frozen weights are cast at each use."""
    return 2.0 * quantised_weights(shape) if has_fp32_weights(job) and not job.uses_lora else 0.0


def head_forward_bytes(shape: ModelShape, job: Job, num_scored: int) -> float:
    """Bytes of TRL's fused head over `num_scored` tokens.

    A tile of logits in bf16, a copy of the hidden states (2H; two fp32 copies and the bf16 one from an fp32 stream,
    10H), 28 bytes of sums per token, and the tile's weights in bf16 if the head is fp32. The tile has TRL's width for
    any vocabulary. 4,096 tokens and more: 256 MiB.
    """
    is_fp32 = has_fp32_weights(job)
    tile = 2 * min(num_scored, TOKEN_CHUNK) * VOCAB_CHUNK
    weights = 2 * min(VOCAB_CHUNK, shape.vocab) * shape.hidden if is_fp32 else 0
    return tile + weights + num_scored * ((10 if is_fp32 else 2) * shape.hidden + 28)


def head_backward_bytes(shape: ModelShape, job: Job, num_scored: int) -> float:
    """Bytes of the fused head's backward: fp32 gradients of the hidden states (4H per token), and for a trained head
    4VH summed in fp32 and, if it is bf16, 2VH cast. Llama-3-8B, trained: 2.9 GiB for the head's part."""
    each = 0 if job.uses_lora else 4 if has_fp32_weights(job) else 6
    gradients = each * shape.vocab * shape.hidden + num_scored * 4 * shape.hidden
    return head_forward_bytes(shape, job, num_scored) + gradients
