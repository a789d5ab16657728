"""Every boolean and every choice of a trainer's config, read from the config itself: a new field joins by itself."""

import re
import typing
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

import trl_ext
from tests.faults import jobs
from trl_ext.errors import ConfigError
from trl_ext.trainers.settings.values import check_settings

CONFIGS = {"grpo": trl_ext.GRPOConfig, "reward": trl_ext.RewardConfig, "ppo": trl_ext.PPOConfig}
# Two epochs and two rounds of rollouts; evaluated, so that settings of evaluation have something to do.
BASE = dict(max_steps=8, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4, save_total_limit=None)
GRPO_TOO = dict(num_generations_eval=2)
# What a setting needs beside it to do something in a run of eight steps.
COMPANIONS = {
    ("load_best_model_at_end", True): dict(eval_steps=1),
    ("save_strategy", "best"): dict(eval_steps=1, metric_for_best_model="loss"),
    ("sync_ref_model", True): dict(ref_model_sync_steps=2, ref_model_mixup_alpha=0.5),
    ("dataloader_persistent_workers", True): dict(dataloader_num_workers=1),
    ("dataloader_multiprocessing_context", "fork"): dict(dataloader_num_workers=1),
    ("lr_scheduler_type", "cosine_with_min_lr"): dict(lr_scheduler_kwargs={"min_lr_rate": 0.1}),
    ("lr_scheduler_type", "cosine_warmup_with_min_lr"): dict(lr_scheduler_kwargs={"min_lr_rate": 0.1}),
    ("lr_scheduler_type", "warmup_stable_decay"): dict(lr_scheduler_kwargs={"num_decay_steps": 4}),
}
# Run alone and not in pairs, and why.
ALONE = {"skip_memory_metrics": "has a thread that spins"}
# Values that no run resumes with, and why.
NOT_RUN = {
    ("ignore_data_skip", True): "asks for other rows after resuming",
    ("save_strategy", "no"): "saves nothing",
    ("torch_compile", True): "compiles for minutes on a CPU",
}
# What is given to the trainer beside its config: a stream instead of rows, and adapters.
STREAM, LORA = "<a stream>", "<LoRA>"
_LISTED = re.compile(r"one of:? (.+?)\.?$")


def values_of(kind: str) -> dict[str, list[Any]]:
    """Return by the name of a setting its values other than that of the job, in which all runs begin."""
    cls = CONFIGS[kind]
    hints, found = typing.get_type_hints(cls), {}
    for field in fields(cls):
        if not field.init:
            continue
        default = None if field.default is MISSING else field.default
        values = _choices(cls, field, hints[field.name])
        base = (jobs.COMMON | BASE | _own(kind)).get(field.name, getattr(default, "value", default))
        found[field.name] = [value for value in values if value != base and (field.name, value) not in NOT_RUN]
    if kind == "ppo":
        found["critic"] = [critic for critic in found["critic"] if critic != "head"]
    else:
        found[LORA] = [True]
    found[STREAM] = [True]
    return {name: values for name, values in found.items() if values}


def _own(kind: str) -> dict[str, Any]:
    return {"grpo": jobs.GRPO | GRPO_TOO, "reward": {}, "ppo": jobs.PPO}[kind]


def _choices(cls: Any, field: Any, hint: Any) -> list[Any]:
    """Return True and False for a boolean, else the words that the field knows; empty if it has none."""
    kinds = typing.get_args(hint) or (hint,)
    found: list[Any] = [True, False] if bool in kinds else []
    for one in kinds:
        if isinstance(one, type) and issubclass(one, Enum):
            found += [member.value for member in one]
        elif typing.get_origin(one) is typing.Literal:
            found += typing.get_args(one)
    found += field.metadata.get("choices") or ()
    if not found and str in kinds:
        found += _told(cls, field.name)
    return found


def _told(cls: Any, name: str) -> list[str]:
    """Return the words that the config lists when it refuses one that it does not know."""
    try:
        check_settings(cls("out", use_cpu=True, bf16=False, **{name: "no such word"}))
    except ConfigError as error:
        listed = _LISTED.search(str(error))
        return re.findall(r"[\w-]+", listed[1]) if listed and f"{name}=" in str(error) else []
    except (ValueError, TypeError, OSError, ImportError, AttributeError):
        return []
    return []


def trainer(kind: str, row: dict[str, Any], **more: Any) -> Any:
    """Build the job's trainer with these settings."""
    settings, given = BASE | (GRPO_TOO if kind == "grpo" else {}) | more, dict(row)
    for one in row.items():
        settings |= COMPANIONS.get(one, {})
    critic = given.pop("critic", "head")
    rows = jobs.pairs().select(range(36)) if kind == "reward" else jobs.prompts(6 if kind == "grpo" else 16)
    held_out = rows.select(range(2))
    if given.pop(STREAM, False):
        rows = rows.to_iterable_dataset()
    if given.pop(LORA, False):
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        settings["peft_config"] = jobs.LoraConfig(**jobs.LORA | {"task_type": task})
    settings |= dict(rows=rows, eval_dataset=held_out) | given
    return jobs.trainer(f"ppo_{critic}" if kind == "ppo" else kind, **settings)
