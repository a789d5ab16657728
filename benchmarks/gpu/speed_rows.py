"""What the speed benchmark measures, as data: whose trainer, an update or a whole step, lengths, layers.

The setting "dualkv" is that of DualKV's measurements (arXiv 2605.15422): a Qwen3-8B, a prompt of 8,192 tokens, 32
completions of 2,048 tokens, forwards of four sequences, gradient checkpointing, AdamW, bf16. They used eight cards and
veRL; here it is one card, and as many of the 36 layers as it holds and gets through in time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.gpu.flops import forward_flops
from benchmarks.grpo_task import Shape, lengths
from trl_ext.memory import Job, estimate, find_shape
from trl_ext.memory.cards import PCIE4, Card, Hardware
from trl_ext.memory.models.find import MODELS
from trl_ext.memory.units import gib

MODEL = "Qwen/Qwen3-8B"
CONFIG: Mapping[str, Any] = {**MODELS[MODEL][1], "head_dim": 128, "vocab_size": 151_936}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
LIBRARIES = ("trl", "trl_ext", "unsloth")
# The seconds that a padded update may take, at an assumed share of the card's rate: it runs twice in a row's minutes.
UPDATE_S, ASSUMED_SHARE = 25.0, 0.4
FULL_SHAPES = {
    "update/dualkv": Shape("dualkv", 8192, 2048, 2048, 0.0, groups=1, generations=32),
    # Generation is a token a forward, and takes no layers off: fewer tokens, so that a row ends in time.
    "step/dualkv": Shape("dualkv", 8192, 512, 512, 0.0, groups=1, generations=32),
    "update/tail": Shape("tail", 256, 512, 4096, 0.8, groups=4, generations=8),
}
TINY_SHAPES = {
    "update/dualkv": Shape("dualkv", 16, 6, 6, 0.0, groups=1, generations=4),
    "step/dualkv": Shape("dualkv", 16, 4, 4, 0.0, groups=1, generations=4),
    "update/tail": Shape("tail", 8, 5, 12, 0.8, groups=2, generations=2),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One trainer on one shape.

    Args:
        name: "update/dualkv/trl".
        shape: Lengths in tokens.
        config: The model's config.json, scaled.
        scale: How it was scaled, in words.
        micro_batch: Sequences in a padded forward; a packed one may hold as many tokens.
    """

    name: str
    shape: Shape
    config: Mapping[str, Any]
    scale: str
    micro_batch: int = 4

    @property
    def measure(self) -> str:
        return self.name.split("/")[0]

    @property
    def library(self) -> str:
        return self.name.split("/")[-1]

    @property
    def budget(self) -> int:
        """Tokens of a padded forward."""
        return self.micro_batch * (self.shape.prompt + self.shape.longest)


def rows(scale: str, card_bytes: int | None, peak_tflops: float | None) -> list[Row]:
    """All rows, scaled to the card; the setting of DualKV first."""
    made = []
    for (kind, shape), library in product((TINY_SHAPES if scale == "tiny" else FULL_SHAPES).items(), LIBRARIES):
        row = Row(f"{kind}/{library}", shape, CONFIG, "")
        if scale == "tiny":
            made.append(replace(row, config={**CONFIG, **TINY}, scale="a toy", micro_batch=2))
        else:
            layers, why = layers_for(row, card_bytes, peak_tflops)
            found = f"{layers} of {CONFIG['num_hidden_layers']} layers, {why}"
            made.append(replace(row, config={**CONFIG, "num_hidden_layers": layers}, scale=found))
    return made


def layers_for(row: Row, card_bytes: int | None, peak_tflops: float | None) -> tuple[int, str]:
    """The most layers that the card holds and gets through in time, and which of the two decides."""
    whole = CONFIG["num_hidden_layers"]
    if card_bytes is None:
        return whole, "as many as there are"
    holds = next((n for n in range(whole, 0, -1) if needs_gib(row, n) <= 0.9 * gib(card_bytes)), 1)
    fits = whole
    if peak_tflops:
        budget = UPDATE_S * ASSUMED_SHARE * peak_tflops * 1e12
        fits = next((n for n in range(whole, 0, -1) if padded_flops(row.shape, n) <= budget), 1)
    if min(holds, fits) == whole:
        return whole, "as many as there are"
    return (holds, "what its memory holds") if holds <= fits else (fits, f"about {UPDATE_S:.0f} s a padded update")


def needs_gib(row: Row, layers: int) -> float:
    """Estimated peak of a padded update with so many layers."""
    shape = row.shape
    job = Job(
        "grpo",
        global_batch=shape.rows,
        per_device_train_batch_size=row.micro_batch,
        max_prompt_length=shape.prompt,
        max_completion_length=shape.longest,
        num_generations=shape.generations,
        packing=False,
    )
    # Any card will do: what is asked is what the job needs.
    hardware = Hardware(1, Card("this", 80.0, 1000, 100, PCIE4, (8, 0)))
    return estimate(job, find_shape({**CONFIG, "num_hidden_layers": layers}), hardware).peak_gib


def padded_flops(shape: Shape, layers: int) -> float:
    """Of an update of padded rows, activations recomputed: four forwards."""
    longest = max(lengths(shape, 0))
    return 4 * shape.rows * forward_flops({**CONFIG, "num_hidden_layers": layers}, shape.prompt, [longest])


def needed_flops(row: Row, completions: list[int]) -> float:
    """Of an update of these completions: three forwards of every group."""
    size = row.shape.generations
    groups = [completions[start : start + size] for start in range(0, len(completions), size)]
    return 3 * sum(forward_flops(row.config, row.shape.prompt, group) for group in groups)
