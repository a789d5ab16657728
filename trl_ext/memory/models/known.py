"""Well-known models by name and by size, for machines without their config.json."""

from typing import Any

from trl_ext.memory.tables import read_table

_TABLE = read_table("models")
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _config(line: str, sizes: list[int], others: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model's config.json, in what differs from its family's default."""
    base = _TABLE["lines"].get(line, {"model_type": line})
    return {**base, **dict(zip(_SIZES, sizes, strict=True)), **(others or {})}


# name: (published parameters, config.json)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (num_params, _config(*config)) for name, (num_params, *config) in _TABLE["models"].items()
}
# Names whose shape is another's.
ALIASES: dict[str, str] = _TABLE["aliases"]
# A size alone stands for a typical model of that size.
TYPICAL: dict[str, str] = _TABLE["typical"]
