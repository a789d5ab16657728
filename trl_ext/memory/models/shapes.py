"""The shape of a language model, and exact parameter counts from it.

A layer is attention (q, k, v, o) and a gated MLP (gate, up, down) or a mixture of MLPs, with norms. Families differ in
biases, in norms on queries and keys, and in fused projections. `families.py` makes a shape from a config.json.

Symbols: H hidden, I intermediate, V vocabulary, nq and nkv query and key/value heads, d head width, L layers.
"""

from dataclasses import dataclass
from functools import lru_cache

from trl_ext.errors import ConfigError

ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection of a layer, by the name that LoRA targets."""

    name: str
    fan_in: int
    fan_out: int
    bias: bool = False

    @property
    def num_params(self) -> int:
        return self.fan_in * self.fan_out + self.bias * self.fan_out


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of MLPs.

    Args:
        num: Experts in a layer.
        per_token: Experts that a token visits.
        intermediate: Width of one expert.
        shared_intermediate: Width of the expert that every token visits, or 0.
        num_dense_layers: Layers with an ordinary MLP instead.
        bias: Router and experts have biases (gpt-oss).
        has_adapters: PEFT's "all-linear" reaches router and experts (Mixtral and Qwen3, in PEFT 0.21).
    """

    num: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    num_dense_layers: int = 0
    bias: bool = False
    has_adapters: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model on which memory and time depend.

    Args:
        name: For messages.
        family: transformers' `model_type`, whose formulas are used.
        qkv_bias, o_bias, mlp_bias: Projections with a bias.
        qk_norm: "" none, "head" one weight per head width (Qwen3), "full" one per projection (OLMo 2).
        num_norms: Norms of width H in a layer.
        fused: One projection for q, k, v and one for gate and up (Phi-3).
        num_sinks: Attention sinks in a layer (gpt-oss).
        is_eager: True if transformers loads it with eager attention, which saves T x T matrices.
        experts: The mixture, None for a dense model.
        max_positions: Tokens that the model was made for.
        extra_params: Parameters that the formulas do not count, such as an image tower; negative if the formulas of
            another family count too many.
        stands_for: transformers' `model_type` if `family` is only the nearest with formulas; else "".
    """

    name: str
    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    num_norms: int = 2
    fused: bool = False
    num_sinks: int = 0
    is_eager: bool = False
    experts: Experts | None = None
    max_positions: int = 0
    extra_params: int = 0
    stands_for: str = ""

    def __hash__(self) -> int:
        # The cached counts below are read thousands of times per plan; the generated hash would read 20 fields.
        return hash((self.name, self.num_layers, self.hidden))

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


def mlp_linears(shape: ModelShape, width: int) -> list[Linear]:
    """Return the projections of an ordinary MLP of the given width."""
    hidden, bias = shape.hidden, shape.mlp_bias
    down = Linear("down_proj", width, hidden, bias)
    if shape.fused:
        return [Linear("gate_up_proj", hidden, 2 * width, bias), down]
    return [Linear("gate_proj", hidden, width, bias), Linear("up_proj", hidden, width, bias), down]


def expert_params(shape: ModelShape) -> int:
    """Parameters of the fused experts and the router in one mixture layer."""
    experts = shape.experts
    if experts is None:
        return 0
    hidden, width = shape.hidden, experts.intermediate
    biases = experts.bias * (experts.num * (2 * width + hidden) + experts.num)
    return experts.num * 3 * hidden * width + hidden * experts.num + biases


def num_dense_layers(shape: ModelShape) -> int:
    """Number of layers with an ordinary MLP."""
    return shape.num_layers if shape.experts is None else shape.experts.num_dense_layers


@lru_cache(maxsize=64)
def model_linears(shape: ModelShape) -> tuple[tuple[Linear, int], ...]:
    """Return each kind of projection in the layers, with its number in the model."""
    hidden, kv_width, bias, dense = shape.hidden, shape.kv_width, shape.qkv_bias, num_dense_layers(shape)
    widths = {"q_proj": shape.q_width, "k_proj": kv_width, "v_proj": kv_width}
    widths = {"qkv_proj": shape.q_width + 2 * kv_width} if shape.fused else widths
    attention = [Linear(name, hidden, width, bias) for name, width in widths.items()]
    attention.append(Linear("o_proj", shape.q_width, hidden, shape.o_bias))
    # In a mixture's layer, the modules other than its experts.
    width = 0 if shape.experts is None else shape.experts.shared_intermediate
    shared = [*mlp_linears(shape, width), Linear("shared_expert_gate", hidden, 1)] if width else []
    parts = (
        (attention, shape.num_layers),
        (mlp_linears(shape, shape.intermediate), dense),
        (shared, shape.num_layers - dense),
    )
    return tuple((linear, count) for linears, count in parts if count for linear in linears)


def embedding_params(shape: ModelShape) -> int:
    """Parameters of the input embedding table: V * H."""
    return shape.vocab * shape.hidden


def head_params(shape: ModelShape) -> int:
    """Parameters of the language model's head, 0 if it is tied to the embedding table."""
    return 0 if shape.tied else shape.vocab * shape.hidden


@lru_cache(maxsize=64)
def largest_weight(shape: ModelShape) -> int:
    """Elements of the largest weight in the layers: a projection, or the fused experts."""
    fused = shape.experts.num * 2 * shape.hidden * shape.experts.intermediate if shape.experts else 0
    return max(fused, *(linear.fan_in * linear.fan_out for linear, _ in model_linears(shape)))


@lru_cache(maxsize=64)
def backbone_params(shape: ModelShape) -> int:
    """Parameters without the head: embeddings, layers and the last norm."""
    sparse_layers = shape.num_layers - num_dense_layers(shape)
    projections = sum(linear.num_params * count for linear, count in model_linears(shape))
    on_heads = {"": 0, "head": 2 * shape.head_dim, "full": shape.q_width + shape.kv_width}[shape.qk_norm]
    norms = shape.num_layers * (shape.num_norms * shape.hidden + on_heads + shape.num_sinks) + shape.hidden
    experts = sparse_layers * expert_params(shape)
    return embedding_params(shape) + projections + norms + experts + shape.extra_params


def lm_params(shape: ModelShape) -> int:
    """Parameters of a causal language model. Llama-3-8B: 8,030,261,248."""
    return backbone_params(shape) + head_params(shape)


def scorer_params(shape: ModelShape) -> int:
    """Parameters of a reward or value model: backbone, head of one output, no bias. Llama-3-8B: 7,504,928,768."""
    return backbone_params(shape) + shape.hidden


@lru_cache(maxsize=64)
def active_params(shape: ModelShape) -> int:
    """Layer weights that multiply a token: in a mixture only of the experts that it visits."""
    if shape.experts is None:
        return quantised_weights(shape)
    visited = shape.experts.per_token * 3 * shape.hidden * shape.experts.intermediate
    return quantised_weights(shape) + (shape.num_layers - num_dense_layers(shape)) * visited


@lru_cache(maxsize=64)
def quantised_weights(shape: ModelShape) -> int:
    """Weights that bitsandbytes stores in 4 or 8 bits: all projections of the layers, without biases and experts."""
    return sum(linear.fan_in * linear.fan_out * count for linear, count in model_linears(shape))


@lru_cache(maxsize=64)
def lora_linears(shape: ModelShape, targets: tuple[str, ...] = ALL_LINEAR) -> tuple[tuple[Linear, int], ...]:
    """Return the projections with adapters. Targets are names of projections, or "all-linear"; raises ConfigError for
    a target that the model lacks."""
    linears = model_linears(shape)
    if targets == ALL_LINEAR:
        return linears
    names = {linear.name for linear, _ in linears}
    if unknown := sorted(set(targets) - names):
        raise ConfigError(f"{shape.name} has no {', '.join(unknown)} for LoRA. It has {', '.join(sorted(names))}.")
    return tuple((linear, count) for linear, count in linears if linear.name in targets)


@lru_cache(maxsize=64)
def lora_params(shape: ModelShape, rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> int:
    """Parameters of an adapter: rank * (inputs + outputs) on each target. Llama-3-8B, all, rank 16: 41,943,040."""
    on_linears = sum(rank * (linear.fan_in + linear.fan_out) * count for linear, count in lora_linears(shape, targets))
    experts, hidden = shape.experts, shape.hidden
    if experts is None or not experts.has_adapters or targets != ALL_LINEAR:
        return on_linears
    # Adapters are on the router and every expert, with twice the rank on the fused gate and up.
    width = experts.intermediate
    per_expert = 2 * rank * (hidden + 2 * width) + rank * (width + hidden)
    per_layer = experts.num * per_expert + rank * (hidden + experts.num)
    return on_linears + (shape.num_layers - num_dense_layers(shape)) * per_layer


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of keys and values per token: 4 * L * nkv * d in bf16. Llama-3-8B: 131,072."""
    return 4 * shape.num_layers * shape.kv_width
