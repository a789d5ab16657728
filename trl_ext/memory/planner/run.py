"""A run's settings: as a `Job`, from a recipe's keys or a trainer's arguments, and as the plan for `memory` sets them.

The trainers' `memory` and `trl-ext check` use it. Settings that the user gave stay, and the launch is fixed. Only
settings in `choices.FREE` change; the global batch never changes.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import HEADROOM_FRAC, Hardware, parse_gpus
from trl_ext.memory.files.launch import engine_fields, launched_with
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job, changed
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape
from trl_ext.memory.planner.choices import FREE, micro_batches
from trl_ext.memory.planner.folder import read_plan
from trl_ext.memory.planner.planner import Plan, Plans, plans_of
from trl_ext.memory.planner.presets import PRESETS
from trl_ext.memory.planner.search import Search, technique

GUESSED_PROMPT_TOKENS = 512  # if the rows cannot be read; guesses are multiples of it
BNB_ADAM = ("adamw_bnb_8bit", "adamw_8bit")
# Arguments whose field of `Job` has another name.
DECIDED_BY = {
    "gradient_accumulation_steps": "per_device_train_batch_size",
    "generation_batch_size": "per_device_train_batch_size",
    "num_mini_batches": "per_device_train_batch_size",
    "gradient_checkpointing": "checkpoint_every",
    "gradient_checkpointing_kwargs": "checkpoint_every",
    "activation_checkpointing": "checkpoint_every",
    "activation_checkpointing_kwargs": "checkpoint_every",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
}
AUTO = "auto"
MICRO = "per_device_train_batch_size"
LAUNCHED = frozenset({"zero_stage", "offload"})
# These change only by an opt-in, which the planner checks.
OPTED = frozenset({"method", "optim", "critic"})
SIZES = frozenset(
    {"reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "sub_group_size"}
)
ALL = frozenset(field.name for field in fields(Job))


def job_of_run(
    trainer: str,
    keys: Mapping[str, Any],
    shape: ModelShape,
    num_processes: int,
    engine: Mapping[str, Any] | None = None,
    prompt_tokens: int | None = None,
) -> Job:
    """Return the run as a job of the planner; raise ConfigError if its settings contradict each other.

    Args:
        trainer: "reward", "grpo" or "ppo".
        keys: Arguments of the trainer's config and, under the names of TRL's ModelConfig, of the model: `dtype`,
            `use_peft`, `lora_r`, ...; also `reward_model` and `reward_adapter` (names, or their number) and
            `value_model`, if used.
        num_processes: One for each GPU.
        engine: DeepSpeed's settings, None without DeepSpeed.
        prompt_tokens: Tokens of the longest prompt, for which trainers have no argument; None if unknown.
    """
    micro, steps = int(keys["per_device_train_batch_size"]), int(keys["gradient_accumulation_steps"])
    fields: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "global_batch": int(keys.get("global_batch") or micro * steps * num_processes),
        # fp32, which needs no bf16 either, counts as fp16.
        "fp16": bool(keys.get("fp16")) or (keys.get("bf16") is False and not keys.get("load_in_4bit")),
        "packing": keys.get("packing") is not False,
        "layer_kernels": keys.get("layer_kernels") is not False,
        "max_tokens_per_forward": keys.get("max_tokens_per_forward") or 0,
        "sequence_parallel": keys.get("sequence_parallel") or 1,
        # Read from the environment, into which the recipe's block `env` was put.
        "expandable_segments": any(
            "expandable_segments:True" in os.environ.get(name, "") for name in (*ALLOCATOR, "PYTORCH_ALLOC_CONF")
        ),
    }
    # transformers before 5.23 knows only the old names of checkpointing.
    is_on = keys.get("activation_checkpointing")
    is_on = keys.get("gradient_checkpointing", True) if is_on is None else is_on
    options = keys.get("activation_checkpointing_kwargs") or keys.get("gradient_checkpointing_kwargs") or {}
    fields["checkpoint_every"] = int(options.get("every_n_layers") or 1) if is_on else 0
    fields["keep_attention"] = bool(is_on and options.get("keep_attention") and fields["packing"])
    fields |= _model(keys, shape) | engine_fields(engine, shape)
    if trainer == "reward":
        fields["activation_offloading"] = bool(keys.get("activation_offloading"))
        fields["max_length"] = keys.get("max_length") or shape.max_positions or Job("reward").max_length
    else:
        fields["max_prompt_length"] = prompt_tokens or GUESSED_PROMPT_TOKENS
        fields |= _generation(keys)
    if trainer == "ppo":
        default = "separate" if keys.get("value_model") else "adapter" if keys.get("use_peft") else "head"
        if keys.get("advantage_estimator", "gae") != "gae":
            default = "none"
        fields["critic"] = str(keys.get("critic") or default)
    return changed(Job(trainer), fields)


def optimizer_name(keys: Mapping[str, Any]) -> str:
    """Return transformers' name of the optimizer."""
    return str(getattr(keys.get("optim"), "value", keys.get("optim")))


def _model(keys: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    is_8bit = optimizer_name(keys) in BNB_ADAM
    # As loaded: float32 by default, as in TRL; "auto", float16 count as bfloat16.
    named = (keys.get("model_init_kwargs") or {}).get("dtype", keys.get("dtype")) or "float32"
    dtype = "float32" if "float32" in str(named) else "bfloat16"
    fields = {"optim": "adamw_bnb_8bit" if is_8bit else "adamw_torch_fused", "dtype": dtype}
    if not keys.get("use_peft"):
        return {**fields, "method": "full"}
    return {
        **fields,
        "method": "qlora" if keys.get("load_in_4bit") else "lora",
        "lora_r": keys["lora_r"],
        "lora_dropout": keys["lora_dropout"],
        "lora_target_modules": _targets(keys.get("lora_target_modules"), shape),
    }


def _targets(named: Any, shape: ModelShape) -> tuple[str, ...]:
    """Return the projections with adapters; PEFT's choice for the family if none are named."""
    targets = (named,) if isinstance(named, str) else tuple(named or ())
    if "all-linear" in targets:
        return ALL_LINEAR
    if targets:
        return targets
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES

    return tuple(CHOICES.get(shape.stands_for or shape.family, ("q_proj", "v_proj")))


def num_named(given: Any) -> int:
    """Count the names in a name, a list of names, a number or None."""
    if isinstance(given, (list, tuple)):
        return len(given)
    return int(given) if isinstance(given, int) else bool(given)


def _generation(keys: Mapping[str, Any]) -> dict[str, Any]:
    accumulation = int(keys["gradient_accumulation_steps"])
    steps = keys.get("steps_per_generation") or accumulation * (keys.get("num_mini_batches") or 1)
    beta = keys.get("kl_coef")
    # A whole reward model counts as large as the policy; an adapter has about 1 % of it.
    copies = num_named(keys.get("reward_model")) + num_named(keys.get("reward_model_name_or_path"))
    adapters = num_named(keys.get("reward_adapter"))
    fields = {
        "max_completion_length": keys.get("response_length") or keys["max_completion_length"],
        "num_generations": keys["num_generations"],
        "beta": keys["beta"] if beta is None else beta,
        # A number equal to a whole optimizer step becomes 0, which means that.
        "steps_per_generation": 0 if steps == accumulation else steps,
        "oversample": keys.get("oversample") or 1.0,
        "ds3_gather_for_generation": keys.get("ds3_gather_for_generation") is not False,
        "reward_model": "copy" if copies else "adapter" if adapters else "none",
        "num_reward_models": max(copies or adapters, 1),
    }
    if not keys.get("use_vllm"):
        return fields
    if keys.get("vllm_mode") == "server":  # its cards do not belong to the run
        ahead = keys.get("generation_ahead") or 0
        return {**fields, "use_vllm": True, "vllm_mode": "server", "generation_ahead": ahead}
    names = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    return {**fields, "use_vllm": True, **{name: keys[name] for name in names}}


# The plan of a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """The machine to plan for, and the plan if `memory` names a preset or a plan.

    Args:
        name: As the user wrote it.
        hardware: The cards; None for this machine's.
        job: The plan's; None to search.
    """

    name: str
    hardware: Hardware | None = None
    job: Job | None = None

    @property
    def kept_free_frac(self) -> float:
        """Share of a card that stays free: the plan's, or the default."""
        return self.hardware.headroom_frac if self.hardware else HEADROOM_FRAC


def parse_memory(memory: Any) -> MemorySetting:
    """Parse `memory`: "auto", cards ("4xA40-48GB"), a preset's name, a plan's folder or plan.json, or a `Plan`.

    Raises:
        ConfigError: An unknown name, with the nearest names; or a plan of another version.
    """
    if isinstance(memory, Plan):
        return MemorySetting(memory.label, memory.estimate.hardware, memory.job)
    text = str(memory).strip()
    if text == AUTO:
        return MemorySetting(text)
    if text in PRESETS:
        planned = PRESETS[text].plan()
        return MemorySetting(text, planned.estimate.hardware, planned.job)
    if Path(text).expanduser().exists() or "/" in text or text.endswith(".json"):
        found = read_plan(Path(text).expanduser())
        return MemorySetting(text, found.estimate.hardware, found.job)
    try:
        return MemorySetting(text, parse_gpus(text))
    except ConfigError as error:
        near = get_close_matches(text, PRESETS, n=2, cutoff=0.4)
        presets = f"Nearest presets: {', '.join(near)}. " if near else ""
        raise ConfigError(
            f"memory is {text!r}, which is neither auto, nor cards, nor a preset, nor the folder of a plan. {presets}"
            f"As cards: {error} A plan for it: `trl-ext plan --gpu_memory_gib ... --write DIR`, and memory=DIR."
        ) from error


@dataclass(frozen=True, slots=True)
class Run:
    """A run before its model loads.

    Args:
        job: Its settings, given or by default.
        given: Fields of `Job` that the user or the launch decided.
        num_processes: As launched, one for each GPU.
        local_processes: Processes on this machine.
    """

    job: Job
    given: frozenset[str]
    shape: ModelShape
    num_processes: int
    local_processes: int

    def search(self, hardware: Hardware, also_open: frozenset[str] = frozenset()) -> Search:
        """Return a search from this run, in which all settings that were not given, and `also_open`, are open. Raises
        ConfigError if the given settings cannot work."""
        is_open = ((FREE | SIZES | OPTED) - self.given) | also_open
        # The planner replaces DeepSpeed's defaults; a micro-batch of one divides every batch.
        default = Job(self.job.trainer)
        job = replace(self.job, **{name: getattr(default, name) for name in is_open & (SIZES | {MICRO})})
        search = Search(job, ALL - is_open, self.shape, hardware)
        search.check()
        return search

    def plans(self, hardware: Hardware, also_open: frozenset[str] = frozenset()) -> Plans:
        """Plan the run, with the settings of `search` open."""
        return plans_of(self.search(hardware, also_open), frozenset())


def settle(run: Run, setting: MemorySetting, machine: Callable[[], Hardware]) -> Plan:
    """Choose the settings for the run; `machine` finds this machine's cards if `setting` names none.

    Raises:
        ConfigError: Nothing fits as launched, with the launch that would; the launch or a given setting contradicts
            the plan; or the plan's method or optimizer is another.
    """
    hardware = replace(_hardware(run, setting, machine), headroom_frac=setting.kept_free_frac)
    if setting.job is not None:
        return _as_planned(run, setting, setting.job, hardware)
    plans = run.plans(hardware)
    if not plans.plans:
        otherwise = run.plans(hardware, LAUNCHED)
        instead = otherwise.advice_for_run
        if otherwise.plans:
            best = otherwise.best
            instead = (f"Launch with {_launch(best.job)}: {best.estimate.peak_gib:.1f} GiB, {best.label}.", *instead)
        nothing = f"Nothing that keeps the optimisation fits on {plans.search.hardware} as launched."
        instead = instead or ("Take more or larger cards, or see `trl-ext plan`.",)
        raise ConfigError(" ".join([nothing, plans.reasons, *instead]))
    return plans.best


def _launch(job: Job) -> str:
    return launched_with(job) or "the files that `trl-ext plan ... --write DIR` makes"


def _hardware(run: Run, setting: MemorySetting, machine: Callable[[], Hardware]) -> Hardware:
    """Return the cards to plan for: the cards in `memory`, or as many of this machine's as there are processes."""
    if setting.hardware is None:
        found = machine()
        if run.local_processes > found.num_gpus:
            raise ConfigError(
                f"{run.local_processes} processes were launched here, and there are {found.num_gpus} cards. Launch "
                "one process for each card."
            )
        machines = max(run.num_processes // max(run.local_processes, 1), 1)
        return replace(found, num_gpus=run.num_processes, num_machines=machines)
    trains = setting.job.training_gpus(setting.hardware.num_gpus) if setting.job else setting.hardware.num_gpus
    if trains != run.num_processes:
        counted = "1 process was" if run.num_processes == 1 else f"{run.num_processes} processes were"
        served = setting.hardware.num_gpus - trains
        server = f", {served} of them for vLLM servers" if served else ""
        raise ConfigError(
            f"memory={setting.name} is for {setting.hardware}{server}, and {counted} launched. Launch with "
            f"--num_processes {trains}, or set memory={run.num_processes}x{setting.hardware.card.name}."
        )
    return replace(setting.hardware, num_gpus=trains)


def _as_planned(run: Run, setting: MemorySetting, planned: Job, hardware: Hardware) -> Plan:
    """Return the settings of a preset or a plan's folder where the user gave none, with the run's batch and lengths.

    Raises:
        ConfigError: The run is launched in another way, has another method or optimizer, or does not fit.
    """
    for name in ("trainer", "zero_stage", "offload", "fsdp", "sequence_parallel"):
        theirs, own = getattr(planned, name), getattr(run.job, name)
        if theirs != own:
            raise ConfigError(
                f"memory={setting.name} is planned with {name}={theirs}, and this run has {name}={own}. Start a "
                f"{planned.trainer} run with {_launch(planned)} and sequence_parallel={planned.sequence_parallel}, or "
                "set memory=auto."
            )
    if planned.method not in ("full", run.job.method) or planned.optim not in (Job("grpo").optim, run.job.optim):
        raise ConfigError(
            f"memory={setting.name} is planned with method={planned.method} and optim={planned.optim}, and this run "
            f"has method={run.job.method} and optim={run.job.optim}. Set the same (use_peft, load_in_4bit, "
            "optim), or memory=auto."
        )
    changes: dict[str, Any] = {name: getattr(planned, name) for name in (FREE | SIZES) - run.given - LAUNCHED}
    if "steps_per_generation" in changes:
        changes["steps_per_generation"] = 0  # the plan's number counts micro-batches of another size
    if MICRO in changes:  # the largest size that divides the run's batch
        sizes = micro_batches(Search(run.job, frozenset(), run.shape, hardware))
        changes[MICRO] = max((size for size in sizes if size <= changes[MICRO]), default=1)
    found = estimate(replace(run.job, **changes), run.shape, hardware)
    if not found.fits:
        job = found.job
        raise ConfigError(
            f"memory={setting.name} was made for sequences of {planned.sequence_tokens} tokens and "
            f"{technique(planned)}. With {job.sequence_tokens} tokens of {run.shape.name} and {technique(job)} it "
            f"needs {found.reason()} (estimated). Set memory=auto, or plan again: `trl-ext plan`."
        )
    return Plan(found)
