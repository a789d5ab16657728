"""The recipe and the rules of a run, for its record: from the script's arguments, or read from a trainer."""

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset

from trl_ext.compat.peft import base_model
from trl_ext.compat.versions import installed_versions
from trl_ext.errors import ConfigError
from trl_ext.resources import __version__
from trl_ext.rewards import RuleColumn, RuleSet
from trl_ext.rewards.text.secrets import public
from trl_ext.trainers.record.launch import launch_line

# Keys about how a run was resumed or restarted, which a repetition must not have.
_NOT_REPEATED = ("resume_from_checkpoint", "resume_despite", "overwrite")
# Fields that TRL's and transformers' configs fill in: a value other than the default need not be the user's.
_FILLED_IN = frozenset(
    "accelerator_config activation_checkpointing bf16 dataloader_pin_memory debug disable_tqdm generation_batch_size "
    "pad_to_multiple_of report_to steps_per_generation".split()
)
_NOT_PLAIN = object()
_RULES_LACK = "Left out, as they may be secrets: entries, and texts for '...'."


class RecordedTrainer(Protocol):
    """A trainer of any kind, when training begins.

    Args:
        args: Its config.
        memory_kind: "grpo", "ppo" or "reward".
        model: The trained model, unwrapped.
        train_dataset, eval_dataset: Its rows.
        given_rewards: Rewards as the user gave them.
        given_lora_targets: `target_modules` of the given LoRA config.
    """

    args: Any
    memory_kind: str
    model: Any
    train_dataset: Any
    eval_dataset: Any
    given_rewards: Sequence[Any]
    given_lora_targets: Any


def recipe_of(trainer: RecordedTrainer) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a run's recipe, and lines about omitted values.

    A script keeps its recipe in `args.recipe`. For a trainer constructed in Python, the training arguments, the
    model's name and LoRA are read from the trainer.
    """
    given = getattr(trainer.args, "recipe", None)
    rules, rules_notes = rules_of(trainer)
    if given is not None:
        keys, notes = dict(given), []
    else:
        keys, notes = _read_back(trainer), _given_as_objects(trainer)
    if rules is not None and (given is None or "rules" in given):
        keys["rules"] = rules  # instead of the path of a file, which may change
    keys.setdefault("seed", trainer.args.seed)
    plain = {name: _plain(value) for name, value in keys.items() if name not in _NOT_REPEATED}
    notes += [f"Left out, as no file can hold it: {name}." for name, value in plain.items() if value is _NOT_PLAIN]
    kept = {name: value for name, value in plain.items() if value is not _NOT_PLAIN}
    shown = public(kept)
    lacks = {name for name, value in kept.items() if shown.get(name) != value}
    lacks |= {*getattr(trainer.args, "recipe_lacks", ()), *(["rules"] if _RULES_LACK in rules_notes else [])}
    if lacks := lacks - {"env"}:
        notes.append(f"Left out, as they may be secrets, of {', '.join(sorted(lacks))}: entries, and texts for '...'.")
    return shown, notes + _drop_hidden_variables(shown)


def _drop_hidden_variables(shown: dict[str, Any]) -> list[str]:
    """Remove the environment variables whose values are hidden from a recipe, and return a line that names them."""
    env = shown.pop("env", None) or {}
    hidden = [name for name, value in env.items() if value is None]
    if len(env) > len(hidden):
        shown["env"] = {name: value for name, value in env.items() if value is not None}
    return [f"Left out, as they may be secrets, of env: {', '.join(hidden)}."] if hidden else []


def rules_of(trainer: RecordedTrainer) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the run's first RuleSet as a mapping, and lines about other rewards or why it cannot be written."""
    sets = [one for one in trainer.given_rewards if isinstance(one, RuleSet)]
    others = [one for one in trainer.given_rewards if not isinstance(one, RuleSet)]
    notes = [f"Scored in addition to rules, or without rules: {in_words(other)}." for other in others]
    notes += [f"A second set scored, too: {json.dumps(_mapping(one)[0])}." for one in sets[1:]]
    if not sets:
        return None, notes
    mapping, problem = _mapping(sets[0])
    given, mapping = mapping, public(mapping)
    notes += [_RULES_LACK] if mapping != given else []
    if mapping is not None and any("__main__." in str(rule["rule"]) for rule in mapping["rules"]):
        problem = "Rules that begin with __main__ are classes of the program that ran, or of its notebook."
    return mapping, [*notes, *([problem] if problem else [])]


def in_words(reward: Any) -> str:
    """Return a reward in words: rules with their weights, a model's folder, or a function's dotted path."""
    if isinstance(reward, RuleSet):
        return ", ".join(f"{rule.name} (weight {rule.weight:g})" for rule in reward.rules)
    if isinstance(reward, RuleColumn):
        return f"rule {reward.__name__}"
    if isinstance(reward, torch.nn.Module):
        config: Any = getattr(reward, "config", None)
        return f"the model {getattr(config, '_name_or_path', '') or type(reward).__name__}"
    name = getattr(reward, "__qualname__", None)
    return reward if isinstance(reward, str) else f"{reward.__module__}.{name}" if name else type(reward).__name__


def data_in_words(dataset: Any) -> str:
    """Return `1,024 rows of openai/gsm8k, with the columns answer, prompt`."""
    columns = f"with the columns {', '.join(getattr(dataset, 'column_names', None) or ['that a stream has'])}"
    if not isinstance(dataset, Dataset):
        return f"a {type(dataset).__name__} {columns}"
    addresses: Iterable[str] = getattr(dataset.info, "download_checksums", None) or ()
    start = "hf://datasets/"
    names = (address.removeprefix(start).partition("@")[0] for address in addresses if address.startswith(start))
    name = next(names, None)
    return f"{len(dataset):,} rows{f' of {name}' if name else ''}, {columns}"


def _mapping(rules: RuleSet) -> tuple[dict[str, Any] | None, str]:
    """Return (mapping for `RuleSet.from_dict`, ""), or (None, why the set cannot be written)."""
    try:
        return rules.to_dict(), ""
    except ConfigError as error:
        return None, f"{error} They are: {in_words(rules)}."


def _read_back(trainer: RecordedTrainer) -> dict[str, Any]:
    """Return the recipe's keys for a trainer that was constructed in Python."""
    args, config = trainer.args, base_model(trainer.model).config
    given = getattr(args, "given", None)
    keys = {"model_name_or_path": config._name_or_path} if getattr(config, "_name_or_path", "") else {}
    for one in fields(args):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        value = getattr(args, one.name)
        is_set = one.name in given if given is not None else value != default and one.name not in _FILLED_IN
        if is_set and one.init:
            keys[one.name] = value
    return keys | _lora_of(trainer)


def _lora_of(trainer: RecordedTrainer) -> dict[str, Any]:
    """Return the recipe's keys for the model's LoRA adapter; empty without an adapter."""
    from peft import LoraConfig

    configs: Mapping[str, Any] = getattr(trainer.model, "peft_config", {})
    config = next((one for one in configs.values() if isinstance(one, LoraConfig)), None)
    if config is None:
        return {}
    keys = {
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": getattr(trainer, "given_lora_targets", None) or config.target_modules,
        "lora_modules_to_save": config.modules_to_save,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
    }
    return {"use_peft": True} | {name: value for name, value in keys.items() if value}


def _given_as_objects(trainer: RecordedTrainer) -> list[str]:
    """Return lines about objects that a trainer was given in Python and that no recipe can name."""
    notes = ["Written by a trainer that was constructed in Python. It was given as objects, which you have to name:"]
    rows = {"train_dataset": trainer.train_dataset, "eval_dataset": trainer.eval_dataset}
    for role, dataset in rows.items():
        parts = {role: dataset}
        if isinstance(dataset, dict):
            parts = {f"{role} {name}": part for name, part in dataset.items()}
        notes += [f"  {name}: {data_in_words(part)}" for name, part in parts.items() if part is not None]
    notes += [f"  reward: {in_words(one)}" for one in trainer.given_rewards if not isinstance(one, RuleSet)]
    if not getattr(base_model(trainer.model).config, "_name_or_path", ""):
        notes.append(f"  model: {type(base_model(trainer.model)).__name__}")
    return notes


def _plain(value: Any) -> Any:
    """Return a value in types of YAML and JSON; `_NOT_PLAIN` if they cannot hold it."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        # Convert instances of subclasses to the base class.
        return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    if isinstance(value, (Path, torch.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return _all_plain({str(key): _plain(item) for key, item in value.items()})
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, Sequence):
        return _all_plain([_plain(item) for item in value])
    return _plain(value.to_dict()) if hasattr(value, "to_dict") else _NOT_PLAIN


def _all_plain(container: Any) -> Any:
    items = container.values() if isinstance(container, dict) else container
    return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else container


_PACKAGES = ("trl", "transformers", "torch", "accelerate", "deepspeed", "peft", "datasets", "vllm")


def versions_of(trainer: RecordedTrainer) -> dict[str, Any]:
    """Return the content of versions.json."""
    return {
        "trainer": trainer.memory_kind,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_processes": trainer.args.world_size,
        "launch": launch_line(),
        "packages": packages(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "commit": commit_of(Path.cwd()),
    }


@cache
def packages() -> dict[str, str]:
    """Return the installed versions of the packages of a run, trl_ext first."""
    found = {"trl_ext": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found |= installed_versions(name)
    return found


@cache
def commit_of(folder: Path) -> str | None:
    """Return the current git commit of a folder; None without git or outside a repository."""
    with suppress(OSError):
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else None
    return None
