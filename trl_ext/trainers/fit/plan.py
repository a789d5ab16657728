"""`memory` of our configs: describe the run to the planner, and write the plan into the run, before models load."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import OffloadPolicy
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from trl_ext.compat.accelerate import fsdp_plugin
from trl_ext.compat.peft import base_model
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.files import settings
from trl_ext.memory.files.launch import fsdp_engine, zero_optimization
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.families import shape_from_config
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.options import LAYERS
from trl_ext.memory.planner.keys import DECIDED_BY, job_of_run
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.planner.run import LAUNCHED, MICRO, SIZES, Run, settle
from trl_ext.trainers.fit.trainer import FittedTrainer
from trl_ext.trainers.settings.checks import sample_of_prompts
from trl_ext.trainers.step.settings import why_micro_batch_stays_whole, why_rows_stay

logger = logging.get_logger(__name__)
NUM_LONGEST = 64  # prompts to tokenize, those with most characters
# Losses that weigh each completion the same for any number of completions per generation.
SPLIT_FREELY = ("grpo", "dr_grpo")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Models, tokenizer and rows that a trainer gets in addition to its arguments.

    Args:
        model: Model, or its name or folder.
        peft_config, quantization_config: The policy's, or None.
        tokenizer: None for the model's.
        dataset: The training rows.
        num_reward_models, num_reward_adapters: Whole models, and LoRA of the policy's backbone, that score.
        has_value_model: True if the user gave a critic model.
    """

    model: Any
    peft_config: Any = None
    quantization_config: Any = None
    tokenizer: Any = None
    dataset: Any = None
    num_reward_models: int = 0
    num_reward_adapters: int = 0
    has_value_model: bool = False


def settle_memory(trainer: str, args: Any, options: dict[str, Any], model: Any, **given: Any) -> None:
    """Plan for `args.memory`, if it is set, and apply the plan.

    Args:
        trainer: "reward", "grpo" or "ppo".
        args: The trainer's config; changed in place, and `memory_plan` set.
        options: Keyword arguments of TRL's trainer.
        model, given: Fields of `Inputs`.

    Raises:
        ConfigError: Nothing fits, or the plan contradicts the launch or a setting that was given.
    """
    if getattr(args, "memory_setting", None) is None:
        return
    if args.memory_setting.hardware is None and args.use_cpu:
        logger.warning("memory=auto plans for GPUs, and use_cpu is set: nothing is planned.")
        return
    inputs = Inputs(model, options.get("peft_config"), options.get("quantization_config"), **given)
    run = describe_run(trainer, args, inputs)
    plan = settle(run, args.memory_setting, cards_here)
    changes = apply(plan.job, args, run)
    args.memory_plan = plan
    if args.process_index == 0:
        print(_summary(plan, changes), file=sys.stderr)


def by_name(method: Callable[..., Any], after: str, rest: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments `rest` of a method by their names; the first follows the parameter `after`."""
    names = list(inspect.signature(method).parameters)
    return dict(zip(names[names.index(after) + 1 :], rest, strict=False))


def cards_here() -> Hardware:
    """Return the cards of this machine; raise ConfigError if there are none."""
    from trl_ext.doctor.look import this_machine

    found = this_machine()
    if found is None:
        raise ConfigError(
            "memory=auto plans for the cards of this machine, and there are none. Name those that the run is for, "
            "such as memory=4xA40-48GB."
        )
    return found


def plan_of(trainer: FittedTrainer) -> Plan | None:
    """Return the trainer's plan, or else its run as it is, on the cards here. Return None without cards, or if the
    formulas do not cover the run."""
    plan: Plan | None = getattr(trainer.args, "memory_plan", None)
    if plan is not None:
        return plan
    try:
        run = describe_run(trainer.memory_kind, trainer.args, inputs_of(trainer))
        if run.shape.stands_for:
            raise ConfigError(
                f"'{run.shape.stands_for}' has no exact formula, only that of a similar model: set memory= to use it."
            )
        return Plan(estimate(run.job, run.shape, replace(cards_here(), num_gpus=run.num_processes)))
    except ConfigError as error:
        logger.info(f"The run is not planned: {error}")
        return None


def inputs_of(trainer: FittedTrainer) -> Inputs:
    """Return the inputs with which a trainer was constructed."""
    rewards = [*getattr(trainer, "reward_funcs", ())]
    critic = getattr(trainer, "_critic", None)
    return Inputs(
        model=trainer.accelerator.unwrap_model(trainer.model),
        tokenizer=trainer.processing_class,
        dataset=trainer.train_dataset,
        num_reward_models=sum(isinstance(getattr(one, "wrapped", one), torch.nn.Module) for one in rewards),
        num_reward_adapters=sum(bool(getattr(one, "is_adapter", False)) for one in rewards),
        has_value_model=critic is not None and critic.name == "separate",
    )


# The run before the plan ---------------------------------------------------------------------------------------------


def describe_run(trainer: str, args: Any, inputs: Inputs) -> Run:
    """Describe the run before its model loads. Raises ConfigError if the formulas do not cover the model's family."""
    if isinstance(inputs.model, str):
        options = {name: value for name, value in _loading(args).items() if name in ("revision", "trust_remote_code")}
        shape = shape_from_config(AutoConfig.from_pretrained(inputs.model, **options).to_dict(), inputs.model)
    else:
        config = base_model(inputs.model).config
        shape = shape_from_config(config.to_dict(), config._name_or_path)
    engine = _engine(args)
    keys = vars(args) | _model_keys(args, inputs)
    prompt_tokens = None if trainer == "reward" else _prompt_tokens(args, inputs)
    job = job_of_run(trainer, keys, shape, args.world_size, engine, prompt_tokens)
    given = decided(job, args, shape, engine, inputs.has_value_model) | LAUNCHED
    if keys["dtype"] is not None:
        given |= {"dtype"}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    return Run(job, given, shape, args.world_size, local)


def decided(
    job: Job, args: Any, shape: ModelShape, engine: Mapping[str, Any] | None, has_value_model: bool
) -> frozenset[str]:
    """Return the fields of `Job` that the user, DeepSpeed's file (`engine`) or the loss decides.

    Args:
        job: The run as a job of the planner.
        args: The run's config.
        shape: The model's.
        engine: DeepSpeed's settings; None without DeepSpeed.
        has_value_model: Whether a value model is given.
    """
    # Sizes that the file gives as numbers; the plan decides "auto" and missing sizes.
    zero = zero_optimization(engine)
    given = frozenset(DECIDED_BY.get(name, name) for name in args.given)
    given |= {name for name in SIZES if zero.get(name, "auto") != "auto"}
    options = args.gradient_checkpointing_kwargs or {}
    if options.get("use_reentrant") or "keep_attention" in options:  # reentrant checkpointing cannot keep it
        given |= {"keep_attention"}
    if job.uses_lora:
        given |= {"method"}
    if has_value_model:
        given |= {"critic"}
    if job.trainer != "grpo" or args.loss_type not in SPLIT_FREELY:
        given |= {"steps_per_generation"}
    if job.generates:
        why_whole = why_micro_batch_stays_whole(
            args,
            takes_images=False,
            has_entropy_bonus=bool(args.entropy_coef) or args.use_adaptive_entropy,
            has_aux_loss=shape.experts is not None,
        )
        if why_rows_stay(args, why_whole):
            given |= {MICRO}
    return given


def _loading(args: Any) -> dict[str, Any]:
    return dict(getattr(args, "model_init_kwargs", None) or {})


def _engine(args: Any) -> dict[str, Any] | None:
    """Return the settings of DeepSpeed or FSDP, from the launcher or the run's arguments. Raises ConfigError if plans
    do not cover FSDP's way of sharding."""
    if plugin := fsdp_plugin(args):
        offloads, reshards = type(plugin.cpu_offload) is not OffloadPolicy, plugin.reshard_after_forward is True
        return fsdp_engine(plugin.fsdp_version, reshards=reshards, offloads=offloads)
    plugin = getattr(args, "deepspeed_plugin", None)
    return None if plugin is None else plugin.deepspeed_config


def _model_keys(args: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the model's arguments under the names of TRL's ModelConfig; `dtype` is None if it was left open."""
    is_loaded = not isinstance(inputs.model, str)
    keys = {
        "dtype": str(next(base_model(inputs.model).parameters()).dtype) if is_loaded else _loading(args).get("dtype"),
        "use_peft": False,
        "reward_model": inputs.num_reward_models,
        "reward_adapter": inputs.num_reward_adapters,
        "value_model": inputs.has_value_model,
    }
    lora = inputs.peft_config
    if lora is None and hasattr(inputs.model, "peft_config"):
        lora = next(iter(inputs.model.peft_config.values()))
    if not hasattr(lora, "r"):  # no adapters, or adapters that the formulas do not cover
        return keys
    targets = lora.target_modules
    return keys | {
        "use_peft": True,
        "load_in_4bit": _is_4bit(_loading(args), inputs),
        "lora_r": lora.r,
        "lora_dropout": lora.lora_dropout,
        "lora_target_modules": [targets] if isinstance(targets, str) else sorted(targets or ()),
    }


def _is_4bit(loading: Mapping[str, Any], inputs: Inputs) -> bool:
    """Return True if the policy's weights have 4 bits by bitsandbytes; other quantized weights are planned as bf16."""
    quantized = inputs.quantization_config or loading.get("quantization_config")
    if not isinstance(inputs.model, str):  # TRL then reads neither
        quantized = getattr(base_model(inputs.model).config, "quantization_config", None)
    to_dict = getattr(quantized, "to_dict", lambda: quantized or {})
    return bool(to_dict().get("load_in_4bit"))


def _prompt_tokens(args: Any, inputs: Inputs) -> int | None:
    """Return the tokens of the longest prompt, the larger of rows and `memory_prompt_length`; None if both are
    unknown. Raises ConfigError if prompt and completion are longer than vLLM's maximum."""
    given, longest = args.memory_prompt_length, _longest_prompt(args, inputs)
    if given and longest and longest > given and args.process_index == 0:
        logger.warning(
            f"The longest prompt has {longest} tokens, and memory_prompt_length is {given}: memory is planned for "
            f"{longest}. Shorten the prompts, or plan again with --max_prompt_length {longest}."
        )
    most = getattr(args, "vllm_max_model_length", None) if getattr(args, "use_vllm", False) else None
    if most and longest and longest + args.max_completion_length > most:
        raise ConfigError(
            f"The longest prompt has {longest} tokens; with max_completion_length={args.max_completion_length} that "
            f"is more than vllm_max_model_length={most}. Shorten the prompts, or raise vllm_max_model_length."
        )
    return max(given or 0, longest or 0) or None


def _longest_prompt(args: Any, inputs: Inputs) -> int | None:
    """Return the tokens of the longest prompt; None for a stream, which cannot be read in advance."""
    rows = inputs.dataset
    if "input_ids" in (getattr(rows, "column_names", None) or ()):
        return max(map(len, rows["input_ids"]), default=None)
    prompts = sample_of_prompts(rows, num_longest=NUM_LONGEST)
    if not prompts:
        return None
    tokenizer = inputs.tokenizer or AutoTokenizer.from_pretrained(
        inputs.model if isinstance(inputs.model, str) else base_model(inputs.model).config._name_or_path
    )
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    texts = (
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        if isinstance(prompt, list)
        else prompt
        for prompt in prompts
    )
    return max(len(tokenizer(text)["input_ids"]) for text in texts)


# The plan into the run --------------------------------------------------------------------------------------------


def apply(job: Job, args: Any, run: Run) -> dict[str, tuple[Any, Any]]:
    """Write a plan's settings into the arguments and DeepSpeed's settings.

    Args:
        run: The run before the change.

    Returns:
        The changes: name -> (before, now).
    """
    before = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    changes = {}
    for name, value in _wanted(job, args, run).items():
        current = getattr(args, name)
        if value != current:
            setattr(args, name, value)
            changes[name] = (current, value)
    if hasattr(args, "generation_batch_size"):
        # TRL computes the completions of a generation when the config is made.
        args.generation_batch_size = args.per_device_train_batch_size * args.world_size * args.steps_per_generation
    _tell_engine(job, args, before)
    return changes


def _wanted(job: Job, args: Any, run: Run) -> dict[str, Any]:
    """Return arguments to set: the plan's settings that differ from the run's, and arguments that follow from them."""
    before = run.job
    wanted = {
        name: value
        for name, value in settings.recipe(job, "", args.world_size).items()
        if name not in ("bf16", "optim", LAYERS) and hasattr(args, name)
        if not hasattr(before, name) or getattr(before, name) != getattr(job, name)
    }
    if "dtype" not in run.given:
        wanted["model_init_kwargs"] = {**_loading(args), "dtype": settings.dtype_of(job) if args.fp16 else job.dtype}
    if (job.checkpoint_every, job.keep_attention) != (before.checkpoint_every, before.keep_attention):
        wanted |= _checkpointing(args, job.checkpoint_every, keeps_attention=job.keep_attention)
    if job.optim != before.optim:
        wanted["optim"] = type(args.optim)(job.optim)
    if hasattr(args, "steps_per_generation"):
        wanted["steps_per_generation"] = job.steps_per_generation or job.accumulation(args.world_size)
    return wanted


def _checkpointing(args: Any, every: int, *, keeps_attention: bool) -> dict[str, Any]:
    """Return checkpointing arguments under transformers' new and old names, with the user's other options."""
    own = ("every_n_layers", "keep_attention")
    options = {name: value for name, value in (args.gradient_checkpointing_kwargs or {}).items() if name not in own}
    if every > 1:
        options["every_n_layers"] = every
    if keeps_attention:
        options["keep_attention"] = True
    wanted = {"gradient_checkpointing": every > 0, "gradient_checkpointing_kwargs": options or None}
    newer = {name.replace("gradient", "activation"): value for name, value in wanted.items()}
    return wanted | {name: value for name, value in newer.items() if hasattr(args, name)}


def _tell_engine(job: Job, args: Any, before: tuple[int, int]) -> None:
    """Write the plan into DeepSpeed's settings, which were filled from the arguments when the config was made."""
    engine = _engine(args)
    if engine is None:
        return
    zero, planned = engine.setdefault("zero_optimization", {}), settings.deepspeed(job)
    for name in ("allgather_bucket_size", "stage3_max_reuse_distance", *SIZES):
        if zero.get(name, "auto") == "auto" and planned and name in planned["zero_optimization"]:
            zero[name] = planned["zero_optimization"][name]
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    filled = {
        "train_micro_batch_size_per_gpu": (before[0], micro),
        "gradient_accumulation_steps": (before[1], steps),
        "train_batch_size": (before[0] * before[1] * args.world_size, micro * steps * args.world_size),
    }
    for name, (old, new) in filled.items():
        if engine.get(name) == old:
            engine[name] = new


def _summary(plan: Plan, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return lines about the plan and the settings that it changed."""
    found, hardware = plan.estimate, plan.estimate.hardware
    lines = [
        f"Memory plan for {found.shape.name} on {hardware}: {plan.label}. {found.memory} "
        f"on a card with {hardware.usable}; about {found.step_s:.0f} s a step (estimated)."
    ]
    shown = {name: new for name, (_, new) in changes.items() if not name.startswith("activation_checkpointing")}
    if shown:
        lines.append("Set by it: " + ", ".join(f"{name}={value}" for name, value in shown.items()) + ".")
    return "\n".join(lines)
