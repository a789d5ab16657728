"""From a recipe of our scripts to a simulation, and to the job that the formulas look at beside it.

The recipe is read as the script reads it; what it leaves out has the default of the trainer's config. Importing TRL
for those takes seconds, so this is no part of `import trl_ext.memory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.files.launch import read_engine
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.run.keys import job_of_run, loaded_dtype
from trl_ext.scripts.arguments import split_config_flag
from trl_ext.scripts.recipe import field_types, read_recipe
from trl_ext.twin.simulation import Simulation, find_config, shortened

TRAINERS = ("reward", "grpo", "ppo")


@dataclass(frozen=True, slots=True)
class Question:
    """A recipe, read.

    Args:
        trainer: Which script it is for.
        keys: Its keys, defaults filled in.
        given: Those that stand in it.
        model: Name or folder.
        deepspeed: DeepSpeed's settings, None without.
        num_gpus: Processes.
        prompt_tokens: Longest prompt; no trainer has an argument for it.
    """

    trainer: str
    keys: Mapping[str, Any]
    given: Mapping[str, Any]
    model: str
    deepspeed: Mapping[str, Any] | None
    num_gpus: int
    prompt_tokens: int


def read_question(
    recipe: str, num_gpus: int, trainer: str | None, model: str | None, deepspeed: str | None, prompt_tokens: int
) -> Question:
    """A recipe and what the command line says beside it.

    Raises:
        ConfigError: A key is unknown or has a value of another type, no model is named, or no trainer can be told.
    """
    path = split_config_flag(["--config", recipe])[1]
    types = {name: _types(name) for name in ([trainer] if trainer else TRAINERS)}
    name = trainer or _trainer_of(path, types)
    given = {key: value for key, value in read_recipe(path, types[name]).items() if key != "env"}
    named = model or given.get("model_name_or_path")
    if not named:
        raise ConfigError(f"{path} names no model. Add model_name_or_path to it, or give --model.")
    keys = {**_defaults(name), **given}
    # TRL 1.12's names, which PPO's recipes may use.
    for old, new in {"response_length": "max_completion_length", "kl_coef": "beta"}.items():
        if given.get(old) is not None:
            keys[new] = given[old]
    return Question(
        name, keys, given, str(named), read_engine(deepspeed or given.get("deepspeed")), num_gpus, prompt_tokens
    )


def _types(trainer: str) -> dict[str, Any]:
    script = import_module(f"trl_ext.scripts.{trainer}")
    return field_types(script.make_parser().dataclass_types)


def _trainer_of(path: str, types: Mapping[str, Mapping[str, Any]]) -> str:
    """The one trainer that knows all keys of the recipe; GRPO before PPO, which knows all of GRPO's."""
    import yaml

    try:
        keys = set(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}) - {"env"}
    except (OSError, yaml.YAMLError):
        read_recipe(path, {})  # says what is wrong with it
        raise
    known = [name for name in TRAINERS if keys <= types[name].keys()]
    if known == ["grpo", "ppo"]:
        return "grpo"
    if len(known) != 1:
        fitting = ", ".join(known) or "none"
        raise ConfigError(f"Which trainer {path} is for cannot be told by its keys ({fitting}). Give --trainer.")
    return known[0]


def _defaults(trainer: str) -> dict[str, Any]:
    script = import_module(f"trl_ext.scripts.{trainer}")
    plain = (bool, int, float, str, type(None))
    kinds = script.make_parser().dataclass_types
    return {f.name: f.default for kind in kinds for f in fields(kind) if isinstance(f.default, plain)}


# Simulation and job -----------------------------------------------------------------------------------------------


def simulation_of_recipe(question: Question) -> Simulation:
    """What the twin runs."""
    keys = question.keys
    own = {name for name in _training_fields(question.trainer) if name in question.given}
    own |= {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}
    arguments = {name: keys[name] for name in own if name in keys}
    if question.trainer != "reward":
        arguments["beta"] = keys["beta"]
    arguments["bf16"] = keys.get("bf16") is not False and not keys.get("fp16")
    for alias in ("kl_coef", "response_length", "num_ppo_epochs", "cliprange"):
        arguments.pop(alias, None)
    num_processes = question.num_gpus if question.deepspeed else 1
    return Simulation(
        trainer=question.trainer,
        config=find_config(question.model),
        arguments=shortened(question.trainer, arguments, num_processes),
        num_gpus=question.num_gpus,
        dtype=loaded_dtype(keys),
        adapter=_adapter(keys),
        deepspeed=question.deepspeed,
        reward_model="copy" if _has_reward_model(question) else "none",
        prompt_tokens=question.prompt_tokens,
        completion_tokens=keys["max_length"] if question.trainer == "reward" else keys["max_completion_length"],
    )


def job_of_recipe(question: Question, shape: ModelShape) -> Job:
    """What the formulas look at."""
    return job_of_run(
        question.trainer, question.keys, shape, question.num_gpus, question.deepspeed, question.prompt_tokens
    )


def _training_fields(trainer: str) -> set[str]:
    script = import_module(f"trl_ext.scripts.{trainer}")
    config = next(kind for kind in script.make_parser().dataclass_types if hasattr(kind, "gradient_checkpointing"))
    return {f.name for f in fields(config)}


def _adapter(keys: Mapping[str, Any]) -> dict[str, Any]:
    if not keys.get("use_peft"):
        return {}
    quantised = bool(keys.get("load_in_4bit") or keys.get("load_in_8bit"))
    targets = keys.get("lora_target_modules")
    if isinstance(targets, list) and targets == ["all-linear"]:
        targets = "all-linear"
    values = {"r": keys["lora_r"], "lora_alpha": keys["lora_alpha"], "lora_dropout": keys["lora_dropout"]}
    return {**values, "target_modules": targets, **({"quantised": True} if quantised else {})}


def _has_reward_model(question: Question) -> bool:
    names = ("reward_model", "reward_model_name_or_path", "reward_funcs_models")
    return question.trainer != "reward" and any(question.given.get(name) for name in names)
