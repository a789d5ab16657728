"""Model shapes from config.json: the keys of each family, and its default for a missing key.

transformers omits from config.json what equals the default of the family's config class, so the table holds the
defaults. A test compares each family's counts with `numel` on the meta device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError, SupportError
from trl_ext.memory.models.shapes import Experts, ModelShape, lm_params
from trl_ext.memory.tables import read_table


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a family from a Llama.

    Args:
        defaults: Values of its config class that matter and differ from Llama's.
        qkv_bias, o_bias: True, False, or the config's key for it.
        qk_norm, num_norms, fused: See `ModelShape`.
        kv_heads_default: Heads of keys and values if the config has none; None for as many as queries.
        has_sinks: True if every head has an attention sink.
        is_eager: True if transformers loads it with eager attention, because its sdpa lacks soft-capping or sinks.
        is_mixture: True if its layers hold experts.
        adapts_experts: True if PEFT's "all-linear" reaches the experts.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    qk_norm: str = ""
    num_norms: int = 2
    fused: bool = False
    kv_heads_default: int | None = None
    has_sinks: bool = False
    is_eager: bool = False
    is_mixture: bool = False
    adapts_experts: bool = False


# Families that resemble none in the table, with the difference.
APART = {kind: "latent attention (MLA)" for kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32")}
# By `model_type`. To add a family, add a line to the table.
FAMILIES: dict[str, Family] = {name: Family(**fields) for name, fields in read_table("families").items()}
# Beginnings of names without a formula, and the nearest family where its own name does not begin them.
NEAREST = {"gemma3": "gemma3_text", "gemma4": "gemma3_text"}
_BEGINNINGS = {**dict(zip(FAMILIES, FAMILIES, strict=True)), **NEAREST}


def shape_from_config(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """Return the shape of a config.json, named `name` in messages. Raises ConfigError for no or an unknown
    `model_type`, or a size that is no positive number."""
    kind = config.get("model_type")
    name = name or config.get("_name_or_path") or kind or "the model"
    if kind and kind not in FAMILIES:
        return _counted(config, str(kind), str(name))
    family = _family(kind, name)
    values = {
        **FAMILIES["llama"].defaults,
        **family.defaults,
        **{key: value for key, value in config.items() if value is not None},
    }
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(values[key], int) or values[key] < 1:
            raise ConfigError(f"{key} is {values[key]!r} in the config of {name}. It must be a positive whole number.")
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
        is_eager=family.is_eager,
        experts=_experts(config, values, family) if family.is_mixture else None,
        max_positions=values["max_position_embeddings"],
        extra_params=values.get("extra_params", 0),
        stands_for=values.get("stands_for", ""),
    )


def _counted(config: Mapping[str, Any], kind: str, name: str) -> ModelShape:
    """Return the shape of a model without a formula: parameters are counted on the meta device, activations and time
    use the nearest formula. Raises ConfigError if transformers does not know the family, or it resembles no Llama."""
    text = {**config, **(config.get("text_config") or {})}
    # The longest known beginning of this name; qwen3_next is a mixture, as qwen3_moe is.
    has_experts = bool(text.get("num_experts") or text.get("num_local_experts"))  # dense models may have the keys, too
    whole = str(text.get("model_type", kind))
    names = [known for known in _BEGINNINGS if whole.startswith(known)]
    alike = [known for known in names if FAMILIES[_BEGINNINGS[known]].is_mixture == has_experts]
    alike = alike or [f"{known}_moe" for known in names if has_experts and f"{known}_moe" in FAMILIES]
    near = max(alike, key=len, default="")
    if not near or text.get("n_routed_experts"):
        _family(kind, name)  # raises
    from trl_ext.compat.transformers import count_params

    try:
        num_params, text = count_params(config)
    except SupportError as error:
        raise ConfigError(f"{name} is a '{kind}', which has no formula, and {error}") from error
    shape = shape_from_config({**text, "model_type": _BEGINNINGS[near]}, name)
    return replace(shape, extra_params=num_params - lm_params(shape), stands_for=kind)


def _family(kind: Any, name: Any) -> Family:
    if not kind:
        raise ConfigError(f"The config of {name} has no model_type. Give a config.json as transformers writes it.")
    if kind in APART:
        raise ConfigError(
            f"{name} is a '{kind}' with {APART[kind]}: no formula here has its projections and its cache, so the "
            "planner gives no number for it. Take a model of another family."
        )
    if kind not in FAMILIES:
        near = get_close_matches(str(kind), FAMILIES, n=1, cutoff=0.5)
        hint = f"The nearest is '{near[0]}'." if near else "For a rough answer give a size, such as --model 8B."
        raise ConfigError(
            f"{name} is a '{kind}', which the planner does not know; it knows {', '.join(sorted(FAMILIES))}. {hint}"
        )
    return FAMILIES[kind]


def _flag(rule: bool | str, values: Mapping[str, Any]) -> bool:
    return bool(values[rule]) if isinstance(rule, str) else rule


def _experts(config: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> Experts:
    # For every family, transformers reads both names and may write either.
    num = config.get("num_experts") or config.get("num_local_experts") or values.get("num_experts")
    has_own_width = "moe_intermediate_size" in family.defaults
    return Experts(
        num=num or values["num_local_experts"],
        per_token=values["num_experts_per_tok"],
        intermediate=values["moe_intermediate_size" if has_own_width else "intermediate_size"],
        shared_intermediate=values.get("shared_expert_intermediate_size") or 0,
        num_dense_layers=sum(
            # Qwen's mixtures may have dense layers in between.
            layer in values.get("mlp_only_layers", ()) or (layer + 1) % values.get("decoder_sparse_step", 1) != 0
            for layer in range(values["num_hidden_layers"])
        ),
        bias=values["model_type"] == "gpt_oss",
        has_adapters=family.adapts_experts,
    )
