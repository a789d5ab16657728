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
from trl_ext.memory.files.launch import read_accelerate, read_deepspeed
from trl_ext.memory.run.keys import GUESSED_PROMPT_TOKENS, loaded_dtype, num_named
from trl_ext.scripts.arguments import split_config_flag
from trl_ext.scripts.recipe import NO_FIELDS, field_types, launch_file, paths_beside, read_recipe
from trl_ext.twin.simulation import Simulation, adapter_of, find_config, shortened

TRAINERS = ("reward", "grpo", "ppo")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a run, as its script would read them.

    Args:
        trainer: Which script the recipe is for.
        keys: All keys of that script, with the defaults of those that the recipe leaves out.
        given: Only the keys that stand in the recipe.
        model: Name or folder.
        deepspeed: DeepSpeed's settings, None without.
        num_gpus: Processes.
        prompt_tokens: Longest prompt; no trainer has an argument for it.
        has_launch: True if a file says how the run is launched.
    """

    trainer: str
    keys: Mapping[str, Any]
    given: Mapping[str, Any]
    model: str
    deepspeed: Mapping[str, Any] | None
    num_gpus: int
    prompt_tokens: int
    has_launch: bool = False


def recipe_of(
    file: str,
    num_gpus: int,
    trainer: str | None,
    model: str | None,
    deepspeed: str | None,
    prompt_tokens: int | None,
    config_file: str | None = None,
) -> Recipe:
    """Read a recipe, and what the command line says beside it; `config_file` is the launch's, if not the recipe's.

    Raises:
        ConfigError: A key is unknown or has a value of another type, no model is named, or no trainer can be told.
    """
    path = split_config_flag(["--config", file])[1]
    types = {name: field_types(_configs(name)) for name in ([trainer] if trainer else TRAINERS)}
    name = trainer or _trainer_of(path, types)
    given = {key: value for key, value in read_recipe(path, types[name]).items() if key not in NO_FIELDS}
    beside = paths_beside(path, given)
    given |= beside
    if "memory" in beside:
        del given["memory"]  # the recipe has the plan's settings already
    named = model or given.get("model_name_or_path")
    if not named:
        raise ConfigError(f"{path} names no model. Add model_name_or_path to it, or give --model.")
    plain = (bool, int, float, str, type(None))
    defaults = {f.name: f.default for kind in _configs(name) for f in fields(kind) if isinstance(f.default, plain)}
    keys = {**defaults, **given}
    # TRL 1.12's names, which PPO's recipes may use.
    for old, new in {"response_length": "max_completion_length", "kl_coef": "beta"}.items():
        if given.get(old) is not None:
            keys[new] = given[old]
    prompt_tokens = prompt_tokens or given.get("memory_prompt_length") or GUESSED_PROMPT_TOKENS
    source = deepspeed or given.get("deepspeed") or config_file or launch_file(path)
    engine = source if source is None or isinstance(source, Mapping) else None
    if isinstance(source, str):
        engine = read_deepspeed(source) if source.endswith(".json") else read_accelerate(source)[1]
    return Recipe(name, keys, given, str(named), engine, num_gpus, prompt_tokens, source is not None)


def _configs(trainer: str) -> list[Any]:
    """The dataclasses whose fields are the keys of the trainer's script."""
    return list(import_module(f"trl_ext.scripts.{trainer}").make_parser().dataclass_types)


def _trainer_of(path: str, types: Mapping[str, Mapping[str, Any]]) -> str:
    """The one trainer that knows all keys of the recipe; GRPO before PPO, which knows all of GRPO's."""
    import yaml

    try:
        keys = set(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}) - NO_FIELDS
    except (OSError, yaml.YAMLError):
        read_recipe(path, {})  # says what is wrong with it
        raise
    known = [name for name in TRAINERS if keys <= types[name].keys()]
    if known == ["grpo", "ppo"]:
        return "grpo"
    if len(known) != 1:
        fitting = ", ".join(known) or "none"
        raise ConfigError(f"Which trainer {path} is for cannot be found from its keys ({fitting}). Give --trainer.")
    return known[0]


# Simulation and job -----------------------------------------------------------------------------------------------


def simulation_of_recipe(recipe: Recipe) -> Simulation:
    """The simulation that the twin runs for a recipe."""
    keys, given = recipe.keys, recipe.given
    config = next(kind for kind in _configs(recipe.trainer) if hasattr(kind, "gradient_checkpointing"))
    own = {f.name for f in fields(config) if f.name in given}
    own |= {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}
    arguments = {name: keys[name] for name in own if name in keys}
    if recipe.trainer != "reward":
        arguments["beta"] = keys["beta"]
    arguments["bf16"] = keys.get("bf16") is not False and not keys.get("fp16")
    for alias in ("kl_coef", "response_length", "num_ppo_epochs", "cliprange"):
        arguments.pop(alias, None)
    num_processes = recipe.num_gpus if recipe.deepspeed else 1
    num_reward_models = num_named(given.get("reward_model")) + num_named(given.get("reward_model_name_or_path"))
    return Simulation(
        trainer=recipe.trainer,
        config=find_config(recipe.model),
        arguments=shortened(recipe.trainer, arguments, num_processes),
        num_gpus=recipe.num_gpus,
        dtype=loaded_dtype(keys),
        adapter=adapter_of(keys),
        deepspeed=recipe.deepspeed,
        reward_model="adapter" if given.get("reward_adapter") else "copy" if num_reward_models else "none",
        num_reward_models=max(num_reward_models, 1),
        prompt_tokens=recipe.prompt_tokens,
        completion_tokens=keys["max_length"] if recipe.trainer == "reward" else keys["max_completion_length"],
    )
