"""Runs of Llama-3-8B on four A40 as estimates, for tests of what would fit instead; and configs of small models."""

from dataclasses import replace

from trl_ext.memory import plan
from trl_ext.memory.formulas.estimate import quick_estimate
from trl_ext.memory.planner.alternatives import next_stage
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import gib

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
GPUS = "4xA40-48GB"
LLAMA = dict(max_prompt_length=1024, max_completion_length=1024)


def config(model_type: str, *sizes: int, kv_heads: int, **others) -> dict:
    """A config.json, its `SIZES` in that order."""
    named = dict(zip(SIZES, sizes, strict=True), num_key_value_heads=kv_heads)
    return {"model_type": model_type, **named, **others}


def planned(**settings) -> Plan:
    """A run of Llama-3-8B on four A40, whether it fits or not."""
    best = plan("grpo", "meta-llama/Meta-Llama-3-8B", GPUS, allow=["lora"], **LLAMA).best
    job = replace(best.job, **settings)
    return Plan(quick_estimate(job, best.estimate.shape, best.estimate.hardware))


def named_stage(**settings) -> str:
    """The next stage and offload, as the message names it."""
    found = next_stage(planned(**settings).estimate)
    return f"{Plan(found).label}: {gib(found.need_bytes):.1f} GiB"


FULL = dict(method="full", zero_stage=2, offload="none", per_device_train_batch_size=4, checkpoint_every=0)
