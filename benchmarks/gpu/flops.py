"""Operations that a step really needs, and which share of the card's rate that comes to (MFU).

Needed is every prompt once a group and every completion once; what padding, copies of prompts and recomputed
activations cost on top is waste, and so no model FLOPs. Multiplications and additions count one each. A backward needs
twice its forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def forward_flops(config: Mapping[str, Any], prompt: int, completions: Sequence[int]) -> float:
    """Of one group through a dense decoder with a gated MLP; the LM head sees what predicts a completion's tokens.

    Args:
        config: The model's config.json.
        prompt: Tokens that all completions share.
        completions: Tokens of each.
    """
    scored = sum(completions)
    looks = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    layer = (prompt + scored) * linear_flops(config) + looks * attention_flops(config)
    return config["num_hidden_layers"] * layer + 2 * scored * config["hidden_size"] * config["vocab_size"]


def linear_flops(config: Mapping[str, Any]) -> float:
    """Of one token through the linear layers of one layer."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    return 2 * hidden * (heads * head + 3 * config["intermediate_size"])


def attention_flops(config: Mapping[str, Any]) -> float:
    """Of one query that looks at one key, over all heads of one layer: the score, and its share of the values."""
    return 4.0 * config["num_attention_heads"] * config["head_dim"]


def mfu(update_flops: float, seconds: float, peak_tflops: float | None) -> float | None:
    """Operations of an update over what the card could do in its time; None for a card of unknown rate."""
    return round(update_flops / (seconds * peak_tflops * 1e12), 4) if peak_tflops else None
