"""A file beside the checkpoints with everything that was known when memory ran out.

Nothing in here may hide the error that it tells of: what cannot be read or written is left out, and said so.
"""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from trl_ext.compat.versions import installed_versions, is_installed
from trl_ext.memory.planner.planner import Plan
from trl_ext.resources import __version__
from trl_ext.trainers.fit.oom.errors import Numbers, Place

SETTINGS = tuple(
    "per_device_train_batch_size gradient_accumulation_steps max_length max_completion_length "
    "max_tokens_per_forward num_generations steps_per_generation packing loss_type critic gradient_checkpointing "
    "activation_offloading use_vllm vllm_gpu_memory_utilization vllm_enable_sleep_mode ds3_gather_for_generation "
    "bf16 fp16 optim memory_on_oom".split()
)


def write_snapshot(
    trainer: Any,
    error: BaseException,
    place: Place,
    running: tuple[int, int] | None,
    numbers: Numbers,
    plan: Plan | None,
) -> str:
    """Write the snapshot; return a sentence that says where it is, or why there is none.

    Args:
        trainer: The trainer.
        error: The allocator's.
        place, numbers: The phase in which it rose, and the memory of the card.
        running: Rows and tokens of the forward, where there was one.
        plan: The run's, None without.
    """
    rank = trainer.accelerator.process_index
    stem = Path(trainer.args.output_dir) / f"oom-step{trainer.state.global_step + 1}-rank{rank}"
    try:
        content = _content(trainer, error, place, running, numbers, plan)
        stem.parent.mkdir(parents=True, exist_ok=True)
        file = stem.with_suffix(".json")
        file.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        return f"Snapshot: {file}{_history(stem)}."
    except Exception as problem:  # whatever it is, the error behind it is the one that counts
        return f"No snapshot: {problem}."


def _content(
    trainer: Any,
    error: BaseException,
    place: Place,
    running: tuple[int, int] | None,
    numbers: Numbers,
    plan: Plan | None,
) -> dict[str, Any]:
    rescue, accelerator = trainer.rescue, trainer.accelerator
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    optional = [name for name in ("deepspeed", "peft", "vllm", "flash_attn") if is_installed(name)]
    return {
        "error": str(error),
        "place": place.words,
        "step": trainer.state.global_step + 1,
        "rank": accelerator.process_index,
        "processes": accelerator.num_processes,
        "forward": None if running is None else {"rows": running[0], "tokens": running[1]},
        "halvings": rescue.level,
        "not_split_because": rescue.why_not or None,
        "gib": {name: getattr(numbers, name) for name in numbers.__slots__},
        "settings": {name: getattr(trainer.args, name) for name in SETTINGS if hasattr(trainer.args, name)},
        "distributed": {
            "type": getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type)),
            "zero_stage": None if plugin is None else plugin.zero_stage,
        },
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "plan": None if plan is None else {"label": plan.label, **plan.estimate.as_dict()},
        "versions": {
            "trl_ext": __version__,
            "python": platform.python_version(),
            **installed_versions("torch", "trl", "transformers", "accelerate", *optional),
        },
        **_card(),
    }


def _card() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"card": None, "memory_stats": None, "memory_summary": None}
    return {
        "card": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "memory_stats": torch.cuda.memory_stats(),
        "memory_summary": torch.cuda.memory_summary(),
    }


def _history(stem: Path) -> str:
    """Write the allocator's own history for pytorch.org/memory_viz, where the user had switched it on."""
    if not torch.cuda.is_available():
        return ""
    # Written for a history that is off, too; then it has no trace of any device.
    if not any(torch.cuda.memory._snapshot()["device_traces"]):
        return ""
    file = stem.with_suffix(".pickle")
    torch.cuda.memory._dump_snapshot(str(file))
    return f" and {file}, for pytorch.org/memory_viz"
