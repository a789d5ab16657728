"""Published seconds and GiB of training runs beside what the planner's formulas give for the same.

Facts from public pages, each with its source; the runs are other programs'. A run of supervised fine-tuning is planned
as the update of GRPO on completions of its length. GB of Qwen's and PEFT's pages are 1e9 bytes (one of them is more
than the card has GiB), those of the others GiB. Where a peer computes full logits, they add 14 bytes a token and word
of the vocabulary.

    python benchmarks/published.py
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.formulas.activations import LOGIT_BYTES
from trl_ext.memory.formulas.estimate import Estimate, quick_estimate
from trl_ext.memory.formulas.peak import footprints, slack_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.planner import plan
from trl_ext.memory.units import GIB

ONE_GPU_CONTEXT_GIB, CONTEXT_GIB = 0.55, 1.2  # NCCL's buffers are in the second
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# First generation, which no table of ours has: layers, hidden, intermediate, heads, vocabulary.
QWEN = {
    "1.8B": (24, 2048, 5504, 16, 151936),
    "7B": (32, 4096, 11008, 32, 151936),
    "14B": (40, 5120, 13696, 40, 152064),
    "72B": (80, 8192, 24576, 64, 152064),
}
LORA = {"method": "lora", "lora_r": 64, "layer_kernels": False}
QLORA = {**LORA, "method": "qlora"}
# Qwen's README (github.com/QwenLM/Qwen): 8 micro-batches of one sequence, at LENGTHS. GB are the sum over the cards.
# (family, model, cards, settings, seconds an iteration, GB)
QWEN_ROWS: list[tuple[str, str, str, dict[str, Any], tuple[float, ...], tuple[float, ...]]] = [
    ("LoRA", "1.8B", "1xA100-80GB", LORA, (1.0, 1.0, 1.1, 1.7, 3.3, 6.8), (6.7, 7.4, 8.4, 11.0, 16.2, 21.8)),
    ("LoRA", "7B", "1xA100-80GB", LORA, (1.2, 1.5, 2.8, 5.2, 10.1, 21.3), (20.1, 20.4, 21.5, 23.8, 29.7, 36.6)),
    ("LoRA", "14B", "1xA100-80GB", LORA, (1.6, 2.4, 4.4, 8.4, 17.0, 36.0), (34.6, 35.1, 35.3, 37.4, 42.5, 55.2)),
    (
        *("LoRA, ZeRO-3", "72B", "4xA100-80GB", {**LORA, "zero_stage": 3}),
        *((17.6, 20.5, 29.4, 45.7, 83.4, 161.5), (215.4, 217.7, 222.6, 228.8, 249.0, 289.2)),
    ),
    ("all weights, ZeRO-3", "7B", "2xA100-80GB", {"zero_stage": 3}, (4.0, 4.0, 4.5), (139.2, 148.0, 162.0)),
    (
        *("all weights, ZeRO-3", "1.8B", "1xA100-80GB", {"zero_stage": 3}),
        *((2.1, 2.2, 2.2, 2.3, 2.8, 5.6), (43.5, 43.5, 43.5, 43.5, 47.1, 48.3)),
    ),
    ("4 bits (GPTQ)", "7B", "1xA100-80GB", QLORA, (3.0, 3.0, 3.5, 7.0, 11.6, 22.3), ()),
    ("4 bits (GPTQ)", "72B", "1xA100-80GB", QLORA, (27.4, 31.5, 41.4, 59.5, 97.7, 179.8), ()),
]
# torchtune's README (compiled; GiB of torch): 2 sequences of 2,048. (model, cards, settings, GiB, tokens a second)
TORCHTUNE_ROWS: list[tuple[str, str, dict[str, Any], float, float]] = [
    ("8B", "1xA6000", {"method": "lora", "checkpoint_every": 0}, 30.3, 4699),
    ("8B", "1xRTX4090", {"method": "lora"}, 16.2, 3083),
    ("8B", "1xRTX4090", {"method": "qlora"}, 7.4, 2413),
    ("70B", "8xA100-80GB", {"method": "lora", "zero_stage": 3}, 27.6, 3497),
]
# fms-acceleration's benchmarks (github.com/foundation-model-stack, scripts/benchmarks/refs): LoRA of rank 16 on the
# projections of attention, sequences of 4,096. (model, cards, sequences, layers are fused, tokens a second of a card)
FMS_ROWS: list[tuple[str, str, int, bool, float]] = [
    ("mistralai/Mistral-7B-v0.3", "1xA100-80GB", 4, False, 3324),
    ("mistralai/Mistral-7B-v0.3", "1xA100-80GB", 8, False, 3354),
    ("mistralai/Mistral-7B-v0.3", "1xA100-80GB", 4, True, 3905),
    ("mistralai/Mistral-7B-v0.3", "1xA100-80GB", 16, True, 3951),
    ("mistralai/Mistral-7B-v0.3", "2xA100-80GB", 4, True, 3671),
    ("mistralai/Mistral-7B-v0.3", "4xA100-80GB", 16, True, 3827),
    ("8B", "1xA100-80GB", 4, True, 3844),
    ("8B", "1xA100-80GB", 16, True, 3892),
    ("8B", "2xA100-80GB", 4, True, 3611),
    ("8B", "2xA100-80GB", 16, True, 3736),
    ("8B", "4xA100-80GB", 4, True, 3606),
    ("8B", "4xA100-80GB", 16, True, 3766),
]
# litgpt's tables: LoRA of rank 8 on q and v, 1,304 tokens, no checkpointing, allocated. (model, sequences, GiB)
LITGPT_ROWS = [("Llama-2-7B", 1, 21.30), ("Llama-2-7B", 2, 29.07), ("Llama-2-13B", 1, 38.12)]
# ms-swift's examples and Megatron page, packed to one sequence. (model, cards, length, stage, seconds, GiB)
SWIFT_ROWS: list[tuple[str, str, int, int, float, float | None]] = [
    ("Qwen/Qwen2.5-7B", "4xA100-80GB", 16384, 3, 10.0, 42.0),
    ("Qwen/Qwen2.5-14B", "8xA800-80GB", 8192, 2, 10.32, None),
    ("Qwen/Qwen2.5-14B", "8xA800-80GB", 8192, 3, 10.56, None),
]
# Whole steps: NeMo-RL's performance summary v0.4, mean lengths, and open-r1's issue 100, with transformers' generate.
# (model, cards, prompt, mean completion, completions, seconds); a sequence has at most 4,096 tokens
STEPS = [
    ("8B", "2x8xH100-80GB", 160, 900, 2048, 97.7),
    ("Qwen/Qwen3-32B", "4x8xH100-80GB", 160, 3046, 2048, 393.0),
    ("Qwen/Qwen3-30B-A3B", "4x8xH100-80GB", 160, 2994, 2048, 225.0),
]


@dataclass(frozen=True)
class Row:
    """A published run.

    Args:
        family: Runs of one source and kind.
        name: Which of them.
        ours: The planner's estimate of the same.
        seconds, gib: What was published; None where nothing was.
        logit_bytes: Of a token and word, of a peer that computes full logits.
        context_gib: What the published GiB hold besides the allocator's.
    """

    family: str
    name: str
    ours: Estimate
    seconds: float | None
    gib: float | None = None
    logit_bytes: int = 0
    context_gib: float = 0.0

    @property
    def time_ratio(self) -> float:
        """Our seconds over the published."""
        assert self.seconds is not None
        parts = self.ours.seconds
        is_whole = self.family == "whole steps"
        return sum(s for name, s in parts.items() if is_whole or name not in ("generation", "scoring")) / self.seconds

    @property
    def memory_ratio(self) -> float:
        """Our GiB, reserved and of the context, over the published."""
        assert self.gib is not None
        needs = []
        for peak in footprints(self.ours.setup):
            if peak.phase in ("generate", "weight_push"):
                continue
            logits = self.logit_bytes * self.ours.shape.vocab * self.ours.job.forward_tokens
            held = peak.num_bytes + (logits if peak.what.endswith("of the head") else 0)
            needs.append(held * (1 + slack_bytes(peak, self.ours.job) / peak.num_bytes))
        return (max(needs) / GIB + self.context_gib) / self.gib


def rows() -> Iterator[Row]:
    """All published runs."""
    for family, name, gpus, settings, seconds, gb in QWEN_ROWS:
        layers, hidden, intermediate, heads, vocab = QWEN[name]
        shape = ModelShape(
            name, "qwen2", layers, hidden, intermediate, heads, heads, hidden // heads, vocab, qkv_bias=True
        )
        num = parse_gpus(gpus).num_gpus
        context = CONTEXT_GIB if num > 1 else ONE_GPU_CONTEXT_GIB
        for place, (length, taken) in enumerate(zip(LENGTHS, seconds, strict=False)):
            gib = gb[place] * 1e9 / GIB / num if gb else None
            ours = _update(shape, gpus, length, 1, 8, settings)
            yield Row(f"Qwen, {family}", f"{name}, {length}", ours, taken, gib, LOGIT_BYTES, context)
    for size, gpus, settings, gib, rate in TORCHTUNE_ROWS:
        ours = _update(find_shape(size), gpus, 2048, 2, 1, {"lora_r": 8, **settings}, False)
        taken = 2 * 2048 * ours.num_gpus / rate
        yield Row("torchtune", f"{size}, {gpus}, {ours.job.method}", ours, taken, gib)
    for model, gpus, num, is_fused, rate in FMS_ROWS:
        settings = {"method": "lora", "lora_r": 16, "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
        settings |= {"zero_stage": 0 if gpus.startswith("1x") else 3, "layer_kernels": is_fused}
        ours = _update(find_shape(model), gpus, 4096, num, 1, settings, False)
        yield Row(
            f"fms, LoRA, {'fused' if is_fused else 'eager'} layers", f"{model}, {gpus}, {num}", ours, 4096 * num / rate
        )
    for model, num, gib in LITGPT_ROWS:
        settings = {"method": "lora", "lora_r": 8, "lora_target_modules": ("q_proj", "v_proj"), "checkpoint_every": 0}
        ours = _update(find_shape(model), "1xA100-40GB", 1304, num, 1, settings)
        yield Row("litgpt", f"{model}, {num}", ours, None, gib, LOGIT_BYTES)
    for model, gpus, length, stage, taken, gib_or_none in SWIFT_ROWS:
        ours = _update(find_shape(model), gpus, length, 1, 2, {"zero_stage": stage})
        yield Row("ms-swift", f"{model}, {gpus}, ZeRO-{stage}", ours, taken, gib_or_none, 0, CONTEXT_GIB)
    yield from _steps()


def _steps() -> Iterator[Row]:
    for model, gpus, prompt, completion, batch, taken in STEPS:
        lengths = {"max_prompt_length": prompt, "max_completion_length": 4096 - prompt, "global_batch": batch}
        lengths["mean_completion_length"] = completion
        settings = {"num_generations": 32, "use_vllm": True, "beta": 0.01, "packing": False}
        best = plan("grpo", model, gpus, **lengths, **settings).best
        yield Row("whole steps", f"{model}, {gpus}", best.estimate, taken)
    settings = {"zero_stage": 3, "num_generations": 16, "beta": 0.04, "per_device_train_batch_size": 16}
    settings |= {"packing": False}
    lengths = {"max_prompt_length": 256, "max_completion_length": 256, "global_batch": 1024}
    best = plan("grpo", "Qwen/Qwen2.5-7B", "8xH100-80GB", steps_per_generation=1, **settings, **lengths).best
    yield Row("whole steps", "Qwen2.5-7B, 8xH100, transformers' generate", best.estimate, 119.0)


def _update(
    shape: ModelShape,
    gpus: str,
    length: int,
    micro: int,
    steps: int,
    settings: dict[str, Any],
    engine: bool = True,
) -> Estimate:
    hardware = parse_gpus(gpus)
    batch = micro * steps * hardware.num_gpus
    job = Job("grpo", max_prompt_length=1, max_completion_length=length - 1, per_device_train_batch_size=micro)
    job = replace(job, global_batch=batch, num_generations=math.gcd(batch, 8), expandable_segments=False, **settings)
    if job.zero_stage == 3 and engine:  # DeepSpeed's own sizes, which those runs had
        sizes = {"sub_group_size": 10**9, "stage3_max_live_parameters": 10**9, "reduce_bucket_size": shape.hidden**2}
        job = replace(job, **sizes, stage3_prefetch_bucket_size=int(0.9 * shape.hidden**2))
    return quick_estimate(job, shape, hardware)


def families(found: list[Row]) -> dict[str, list[Row]]:
    """Rows by family."""
    return {name: [row for row in found if row.family == name] for name in dict.fromkeys(row.family for row in found)}


def main() -> None:
    """Print ours over the published, by family."""
    found, console = list(rows()), Console()
    for title, has, ratio in (
        ("seconds", "seconds", Row.time_ratio.fget),
        ("GiB", "gib", Row.memory_ratio.fget),
    ):
        table = Table("family", "runs", "median", "least", "most", title=f"ours over the published, {title}")
        assert ratio is not None
        for name, some in families([row for row in found if getattr(row, has) is not None]).items():
            ratios = [ratio(row) for row in some]
            table.add_row(name, str(len(some)), *(f"{one:.2f}" for one in (median(ratios), min(ratios), max(ratios))))
        console.print(table)


if __name__ == "__main__":
    main()
