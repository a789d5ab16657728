"""From a config.json to a model's shape: which keys a family has, and what a missing one means.

transformers leaves out of config.json what equals the default of the family's config class, so the defaults stand
here. A test compares each family's counts with `numel` on the meta device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.models.shapes import Experts, ModelShape


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from a Llama.

    Args:
        defaults: Of its config class, where they matter and are not those of Llama.
        qkv_bias: Always, never, or a key of the config that says so.
        o_bias: As `qkv_bias`.
        qk_norm, num_norms, fused: See `ModelShape`.
        kv_heads_default: Heads of keys and values if the config is silent; None for as many as queries.
        has_sinks: One attention sink a head.
        is_mixture: Its layers hold experts.
        adapts_experts: PEFT's "all-linear" reaches them.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    qk_norm: str = ""
    num_norms: int = 2
    fused: bool = False
    kv_heads_default: int | None = None
    has_sinks: bool = False
    is_mixture: bool = False
    adapts_experts: bool = False


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_GEMMA = {"vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_QWEN_MOE = {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "granite": Family(),
    "mistral": Family(
        {"intermediate_size": 14336, "max_position_embeddings": 131072}, False, False, kv_heads_default=8
    ),
    "qwen2": Family(_QWEN, qkv_bias=True, o_bias=False, kv_heads_default=32),
    "qwen3": Family({**_QWEN, "head_dim": 128}, qk_norm="head", kv_heads_default=32),
    "smollm3": Family(
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        kv_heads_default=4,
    ),
    "olmo2": Family({"vocab_size": 50304}, qk_norm="full"),
    "phi3": Family(
        {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096},
        qkv_bias=False,
        o_bias=False,
        fused=True,
    ),
    "gemma": Family(
        {
            **_GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
        kv_heads_default=16,
    ),
    "gemma2": Family(_GEMMA2, num_norms=4, kv_heads_default=4),
    "gemma3_text": Family(
        {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072},
        qk_norm="head",
        num_norms=4,
        kv_heads_default=4,
    ),
    "mixtral": Family(
        {
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        qkv_bias=False,
        o_bias=False,
        kv_heads_default=8,
        is_mixture=True,
        adapts_experts=True,
    ),
    "qwen2_moe": Family(
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        qkv_bias="qkv_bias",
        o_bias=False,
        kv_heads_default=16,
        is_mixture=True,
    ),
    "qwen3_moe": Family(
        {
            **_QWEN_MOE,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="head",
        kv_heads_default=4,
        is_mixture=True,
        adapts_experts=True,
    ),
    "gpt_oss": Family(
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        kv_heads_default=8,
        has_sinks=True,
        is_mixture=True,
    ),
}


def shape_from_config(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        config: Its keys and values.
        name: For messages; the config's own name or family if None.

    Raises:
        ConfigError: No or an unknown `model_type`, or a size that is no positive number.
    """
    kind = config.get("model_type")
    name = name or config.get("_name_or_path") or kind or "the model"
    family = _family(kind, name)
    values = {**_LLAMA, **family.defaults, **{key: value for key, value in config.items() if value is not None}}
    _check_sizes(values, name)
    num_heads = values["num_attention_heads"]
    return ModelShape(
        name=str(name),
        family=str(kind),
        num_layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        intermediate=values["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or family.kv_heads_default or num_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
        vocab=values["vocab_size"],
        tied=bool(values["tie_word_embeddings"]),
        qkv_bias=_flag(family.qkv_bias, values),
        o_bias=_flag(family.o_bias, values),
        mlp_bias=bool(values["mlp_bias"]),
        qk_norm=family.qk_norm,
        num_norms=family.num_norms,
        fused=family.fused,
        num_sinks=num_heads if family.has_sinks else 0,
        experts=_experts(config, values, family) if family.is_mixture else None,
        max_positions=values["max_position_embeddings"],
    )


def _family(kind: Any, name: Any) -> Family:
    if not kind:
        raise ConfigError(f"The config of {name} has no model_type. Give a config.json as transformers writes it.")
    if kind not in FAMILIES:
        near = get_close_matches(str(kind), FAMILIES, n=1, cutoff=0.5)
        hint = f"The nearest is '{near[0]}'." if near else "For a rough answer give a size, such as --model 8B."
        raise ConfigError(
            f"{name} is a '{kind}', which the planner does not know; it knows {', '.join(sorted(FAMILIES))}. {hint}"
        )
    return FAMILIES[kind]


def _check_sizes(values: Mapping[str, Any], name: Any) -> None:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(values[key], int) or values[key] < 1:
            raise ConfigError(f"{key} is {values[key]!r} in the config of {name}. It must be a positive whole number.")


def _flag(rule: bool | str, values: Mapping[str, Any]) -> bool:
    return bool(values[rule]) if isinstance(rule, str) else rule


def _experts(config: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> Experts:
    # transformers reads either name in every family and writes either one.
    num = config.get("num_experts") or config.get("num_local_experts") or values.get("num_experts")
    has_own_width = "moe_intermediate_size" in family.defaults
    return Experts(
        num=num or values["num_local_experts"],
        per_token=values["num_experts_per_tok"],
        intermediate=values["moe_intermediate_size" if has_own_width else "intermediate_size"],
        shared_intermediate=values.get("shared_expert_intermediate_size") or 0,
        num_dense_layers=sum(_is_dense(layer, values) for layer in range(values["num_hidden_layers"])),
        bias=values["model_type"] == "gpt_oss",
        has_adapters=family.adapts_experts,
    )


def _is_dense(layer: int, values: Mapping[str, Any]) -> bool:
    """Qwen's mixtures may have ordinary layers between."""
    return layer in values.get("mlp_only_layers", ()) or (layer + 1) % values.get("decoder_sparse_step", 1) != 0
