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


def verl_update_flops(config: Mapping[str, Any], prompt: int, completions: Sequence[int]) -> float:
    """Of an update as verl counts it: a copy of the prompt for each completion, embedding and LM head over all tokens.

    By these DualKV's shares of the card (arXiv 2605.15422) are measured.

    Source: verl, `verl/utils/flops_counter.py`, `_estimate_qwen2_flops`: 6 operations a weight and token, 6 a pair of
    tokens, channel of a head, head and layer.
    """
    rows = [prompt + n for n in completions]
    layers = config["num_hidden_layers"]
    weights = layers * linear_flops(config) / 2 + 2 * config["hidden_size"] * config["vocab_size"]
    looks = 6 * sum(n * n for n in rows) * config["num_attention_heads"] * config["head_dim"] * layers
    return 6 * weights * sum(rows) + looks


def mfu(update_flops: float, seconds: float, peak_tflops: float | None) -> float | None:
    """Operations of an update over what the card could do in its time; None for a card of unknown rate."""
    return round(update_flops / (seconds * peak_tflops * 1e12), 4) if peak_tflops else None
