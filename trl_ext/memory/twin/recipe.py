"""From a recipe of our scripts to a simulation, and to the job that the formulas look at beside it.

The recipe is read as the script reads it; what it leaves out has the default of the trainer's config. Importing TRL
for those takes seconds, so this is no part of `import trl_ext.memory`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.job import Job
from trl_ext.memory.models import cached_config, find_shape
from trl_ext.memory.shapes import ModelShape
from trl_ext.memory.twin.simulation import Simulation, config_of, shortened
from trl_ext.scripts.arguments import split_config_flag
from trl_ext.scripts.recipe import field_types, read_recipe

TRAINERS = ("reward", "grpo", "ppo")
# DeepSpeed's own values where its file is silent, in elements.
DEEPSPEED_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "sub_group_size": 1_000_000_000,
}


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
        name, keys, given, str(named), _deepspeed(deepspeed or given.get("deepspeed")), num_gpus, prompt_tokens
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


def _deepspeed(source: Any) -> dict[str, Any] | None:
    """DeepSpeed's settings: a mapping, the path of its JSON, or of an accelerate file with a `deepspeed_config`."""
    if source is None or isinstance(source, Mapping):
        return None if source is None else dict(source)
    path = Path(str(source))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give DeepSpeed's JSON or accelerate's YAML.") from error
    if path.suffix == ".json":
        return json.loads(text)
    import yaml

    return _from_accelerate(yaml.safe_load(text) or {}, path)


def _from_accelerate(launch: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    if launch.get("distributed_type") == "FSDP":
        raise ConfigError(f"{path} asks for FSDP, which neither the formulas nor the twin know. Use DeepSpeed.")
    inner = launch.get("deepspeed_config") or {}
    if inner.get("deepspeed_config_file"):
        return _deepspeed(str(path.parent / inner["deepspeed_config_file"]))
    if "zero_stage" not in inner:
        return None
    offload = {
        f"offload_{what}": {"device": inner[f"offload_{what}_device"]}
        for what in ("optimizer", "param")
        if inner.get(f"offload_{what}_device", "none") != "none"
    }
    owned = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    return {**owned, "zero_optimization": {"stage": int(inner["zero_stage"]), **offload}}


# The model --------------------------------------------------------------------------------------------------------


def find_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, of the hub's local cache, or of a known name or size."""
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        cached = cached_config(model)
        if cached is None:
            return config_of(find_shape(model))
        file = cached
    return json.loads(file.read_text(encoding="utf-8"))


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
        dtype=_dtype(keys),
        adapter=_adapter(keys),
        deepspeed=question.deepspeed,
        reward_model="copy" if _has_reward_model(question) else "none",
        prompt_tokens=question.prompt_tokens,
        completion_tokens=keys["max_length"] if question.trainer == "reward" else keys["max_completion_length"],
    )


def job_of_recipe(question: Question, shape: ModelShape) -> Job:
    """What the formulas look at."""
    keys, zero = question.keys, (question.deepspeed or {}).get("zero_optimization", {})
    micro, accumulation = keys["per_device_train_batch_size"], keys["gradient_accumulation_steps"]
    values = {
        "trainer": question.trainer,
        "method": ("qlora" if keys.get("load_in_4bit") else "lora") if keys.get("use_peft") else "full",
        "reward_model": "copy" if _has_reward_model(question) else "none",
        "beta": keys.get("beta", 0.0),
        "global_batch": micro * accumulation * question.num_gpus,
        "steps_per_generation": keys.get("steps_per_generation") or 0,
        "checkpoint_every": _checkpoint_every(keys),
        "dtype": _dtype(keys),
        "zero_stage": int(zero.get("stage", 0)),
        "offload": _offload(zero),
        "max_prompt_length": question.prompt_tokens,
        "max_tokens_per_forward": keys.get("max_tokens_per_forward") or 0,
        "packing": keys.get("packing") is not False,
        "activation_offloading": bool(keys.get("activation_offloading")),
        **_buckets(zero, shape),
    }
    same = ("per_device_train_batch_size", "max_length", "max_completion_length", "num_generations", "lora_r")
    same += ("lora_dropout", "use_vllm", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    same += ("vllm_enable_sleep_mode", "ds3_gather_for_generation")
    values |= {name: keys[name] for name in same if keys.get(name) is not None}
    if question.trainer == "ppo":
        values["critic"] = _critic(keys)
    if keys.get("use_peft") and keys.get("lora_target_modules"):
        targets = keys["lora_target_modules"]
        values["lora_target_modules"] = (targets,) if isinstance(targets, str) else tuple(targets)
    if "8bit" in str(keys.get("optim")):
        values["optim"] = "adamw_bnb_8bit"
    return Job(**values)


def _training_fields(trainer: str) -> set[str]:
    script = import_module(f"trl_ext.scripts.{trainer}")
    config = next(kind for kind in script.make_parser().dataclass_types if hasattr(kind, "gradient_checkpointing"))
    return {f.name for f in fields(config)}


def _dtype(keys: Mapping[str, Any]) -> str:
    name = str(keys.get("dtype") or "float32")
    return "bfloat16" if name == "auto" else name


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


def _critic(keys: Mapping[str, Any]) -> str:
    """As PPOTrainer chooses."""
    if keys.get("critic"):
        return keys["critic"]
    if keys.get("value_model"):
        return "separate"
    return "adapter" if keys.get("use_peft") else "head"


def _checkpoint_every(keys: Mapping[str, Any]) -> int:
    if not keys.get("gradient_checkpointing", True):
        return 0
    return int((keys.get("gradient_checkpointing_kwargs") or {}).get("every_n_layers", 1))


def _offload(zero: Mapping[str, Any]) -> str:
    def is_off(what: str) -> bool:
        return (zero.get(f"offload_{what}") or {}).get("device", "none") == "none"

    return "all" if not is_off("param") else "none" if is_off("optimizer") else "optimizer"


def _buckets(zero: Mapping[str, Any], shape: ModelShape) -> dict[str, int]:
    """Sizes in elements. The Trainer fills "auto" from the hidden size."""
    auto = {"reduce_bucket_size": shape.hidden**2, "stage3_prefetch_bucket_size": int(0.9 * shape.hidden**2)}
    found = {}
    for name, default in DEEPSPEED_DEFAULTS.items():
        value = zero.get(name, default)
        found[name] = int(auto.get(name, default) if value == "auto" else value)
    return found
