"""From what a user asks to what the planner searches: his settings over the defaults, checked as far as they are
settled, and the words that he allows."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas.generation import check_vllm
from trl_ext.memory.job import Job, changed, check_batch, check_model
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.ladder import Search

ALLOW = ("lora", "qlora", "adam8bit", "shorter", "fewer")
_ALIASES = {"zero": "zero_stage", "micro_batch": "per_device_train_batch_size", "vllm": "use_vllm"}


def unalias(name: str) -> str:
    """A setting's name in `Job`: zero is zero_stage."""
    return _ALIASES.get(name, name)


def make_search(trainer: str, shape: ModelShape, hardware: Hardware, settings: Mapping[str, Any]) -> Search:
    """The user's settings over the defaults, checked as far as they are settled."""
    settings = unaliased(settings)
    settings["global_batch"] = _global_batch(settings, hardware.num_gpus)
    settings.pop("gradient_accumulation_steps", None)
    given = frozenset(settings)
    if "adapter" in (settings.get("critic"), settings.get("reward_model")):
        settings.setdefault("method", "lora")  # who asks for an adapter asks for LoRA
    method = settings.get("method", "full")
    job = changed(Job(trainer), {**ppo_defaults(trainer, method, given), **_stage_for(settings), **settings})
    check_model(job, shape)
    check_batch(job, hardware.num_gpus)
    if "vllm_gpu_memory_utilization" in given:
        check_vllm(shape, hardware.card, job, hardware.num_gpus)
    return Search(job, given, shape, hardware)


def unaliased(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of `Job`: zero is zero_stage."""
    return {unalias(name): value for name, value in settings.items()}


def _global_batch(settings: Mapping[str, Any], num_gpus: int) -> int:
    """The user's, or what his micro-batch and accumulation make, or 64 rounded to whole rows of GPUs."""
    micro = settings.get("per_device_train_batch_size")
    steps = settings.get("gradient_accumulation_steps")
    if "global_batch" in settings:
        return int(settings["global_batch"])
    if steps is not None:
        return int(micro or 1) * int(steps) * num_gpus
    row = int(micro or 1) * num_gpus
    group = int(settings.get("num_generations", 8))
    step = row * group if row % group else row
    return max(1, round(64 / step)) * step


def ppo_defaults(trainer: str, method: str, given: frozenset[str]) -> dict[str, Any]:
    """PPO's critic and reward model: adapters where there are adapters, else models of their own."""
    if trainer != "ppo":
        return {}
    is_full = method == "full"
    defaults = {
        "critic": "separate" if is_full else "adapter",
        "reward_model": "copy" if is_full else "adapter",
        "num_generations": 1,
        "beta": 0.05,
    }
    return {name: value for name, value in defaults.items() if name not in given}


def _stage_for(settings: Mapping[str, Any]) -> dict[str, int]:
    """A stage to start from that goes with the user's offload; the search finds the best one."""
    return {"optimizer": {"zero_stage": 2}, "all": {"zero_stage": 3}}.get(settings.get("offload", "none"), {})


def words_of(allow: Iterable[str]) -> frozenset[str]:
    words = frozenset(word.strip() for word in allow if word.strip())
    for word in sorted(words - set(ALLOW)):
        near = get_close_matches(word, ALLOW, n=1, cutoff=0.0)[0]
        raise ConfigError(f"'{word}' cannot be allowed. Words: {', '.join(ALLOW)}; the nearest is {near}.")
    return words
