"""`memory` of our configs: from the run as it stands to a plan, and from the plan into the run, before models load."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.estimate import estimate
from trl_ext.memory.files import settings
from trl_ext.memory.job import Job, changed
from trl_ext.memory.models.families import shape_from_config
from trl_ext.memory.models.shapes import ALL_LINEAR, ModelShape
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.run.fields import given_fields, run_fields
from trl_ext.memory.run.settle import LAUNCHED, SIZES, Run, faster_launch, settle
from trl_ext.memory.units import gib
from trl_ext.trainers.checks import sample_of_prompts
from trl_ext.trainers.forward.group_order import split_is_free

logger = logging.get_logger(__name__)
GUESSED_PROMPT = 512  # of a stream, which cannot be looked at
NUM_LONGEST = 64  # of the prompts, those with most characters are tokenized
# Losses that sum over the completions alike however many are generated at once.
SPLIT_FREELY = ("grpo", "dr_grpo")


@dataclass(frozen=True, slots=True)
class Asked:
    """What was given to a trainer beside its arguments.

    Args:
        model: Model or path.
        peft_config, quantization_config: Of the policy, or None.
        tokenizer: Or None.
        dataset: The training rows.
        reward_model: "none", "copy" or "adapter".
        has_value_model: A critic of its own was given.
    """

    model: Any
    peft_config: Any = None
    quantization_config: Any = None
    tokenizer: Any = None
    dataset: Any = None
    reward_model: str = "none"
    has_value_model: bool = False


def settle_memory(trainer: str, args: Any, asked: Asked) -> Asked:
    """Plan and apply, where `args.memory` asks for it.

    Args:
        trainer: "reward", "grpo" or "ppo".
        args: The trainer's config; changed in place, and `memory_plan` set.
        asked: What the trainer was given.

    Returns:
        The same, with adapters or a 4-bit base where `memory_allow` let the plan take them.

    Raises:
        ConfigError: Nothing fits, or the plan contradicts the launch or a setting that was given.
    """
    if getattr(args, "memory_source", None) is None:
        return asked
    if args.memory_source.hardware is None and args.use_cpu:
        logger.warning("memory=auto plans for GPUs, and use_cpu is set: nothing is planned.")
        return asked
    run = describe_run(trainer, args, asked)
    plan = settle(run, args.memory_source, args.memory_words, this_machine)
    changes = apply(plan.job, args, run)
    args.memory_plan = plan
    if args.process_index == 0:
        print(_told(plan, changes, faster_launch(run, plan, args.memory_words)), file=sys.stderr)
    return _with_adapters(plan, asked)


def by_name(method: Callable[..., Any], after: str, rest: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of a method by their names.

    Args:
        method: Whose.
        after: The parameter that the first of them follows.
        rest: The arguments.
    """
    names = list(inspect.signature(method).parameters)
    return dict(zip(names[names.index(after) + 1 :], rest, strict=False))


def this_machine() -> Hardware:
    """The cards here.

    Raises:
        ConfigError: There are none.
    """
    from trl_ext.doctor.look import host_memory, look_at_cards
    from trl_ext.doctor.machine import hardware_of

    cards = look_at_cards()
    if not cards.gpus:
        raise ConfigError(
            "memory=auto plans for the cards of this machine, and there are none. Name those that the run is for, "
            "such as memory=4xA40-48GB."
        )
    return hardware_of(cards.gpus, cards.has_nvlink, cards.has_peer_access, host_memory()[1])


def plan_of(trainer: Any) -> Plan | None:
    """The trainer's plan; without one its run as it is, on the cards here, with what it needs by the formulas.

    Returns:
        None where there are no cards, or the formulas do not know the run.
    """
    if getattr(trainer.args, "memory_plan", None) is not None:
        return trainer.args.memory_plan  # type: ignore[no-any-return]
    try:
        run = describe_run(trainer.memory_kind, trainer.args, asked_of(trainer))
        job = changed(Job(run.trainer), run.fields)
        return Plan(estimate(job, run.shape, replace(this_machine(), num_gpus=run.num_processes)))
    except ConfigError as error:
        logger.info(f"The run is not planned: {error}")
        return None


def asked_of(trainer: Any) -> Asked:
    """What a trainer that stands was given."""
    rewards = [*getattr(trainer, "reward_funcs", ())]
    is_whole = any(isinstance(getattr(reward, "wrapped", reward), torch.nn.Module) for reward in rewards)
    critic = getattr(trainer, "_critic", None)
    return Asked(
        model=trainer.accelerator.unwrap_model(trainer.model),
        tokenizer=trainer.processing_class,
        dataset=trainer.train_dataset,
        reward_model="adapter" if getattr(trainer, "_reward_adapter", None) else "copy" if is_whole else "none",
        has_value_model=critic is not None and critic.name == "separate",
    )


# The run as it stands ---------------------------------------------------------------------------------------------


def describe_run(trainer: str, args: Any, asked: Asked) -> Run:
    """What the planner has to know.

    Raises:
        ConfigError: The model's family is unknown to the formulas.
    """
    shape = _shape(args, asked.model)
    engine = _engine(args)
    keys = vars(args) | _model_keys(args, asked)
    prompt_tokens = None if trainer == "reward" else _prompt_tokens(args, asked)
    fields = run_fields(trainer, keys, shape, args.world_size, engine, prompt_tokens)
    given = given_fields(args.given) | LAUNCHED | _sizes_in(engine)
    if keys["use_peft"]:
        given |= {"method"}
    if asked.has_value_model:
        given |= {"critic"}
    if keys["dtype"] is not None:
        given |= {"dtype"}
    if trainer != "grpo" or args.loss_type not in SPLIT_FREELY:
        given |= {"steps_per_generation"}
    if trainer != "reward" and not split_is_free(args, _wants_entropy(args), shape.experts is not None):
        given |= {"per_device_train_batch_size"}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    return Run(trainer, shape, fields, given, args.world_size, local)


def _wants_entropy(args: Any) -> bool:
    return bool(args.entropy_coef) or args.use_adaptive_entropy


def _shape(args: Any, model: Any) -> ModelShape:
    if not isinstance(model, str):
        config = _bare(model).config
    else:
        options = {name: value for name, value in _loading(args).items() if name in ("revision", "trust_remote_code")}
        config = AutoConfig.from_pretrained(model, **options)
    name = model if isinstance(model, str) else config._name_or_path
    return shape_from_config(config.to_dict(), name)


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _loading(args: Any) -> dict[str, Any]:
    return dict(getattr(args, "model_init_kwargs", None) or {})


def _engine(args: Any) -> dict[str, Any] | None:
    """DeepSpeed's settings, as the launcher or `args.deepspeed` gave them."""
    plugin = getattr(args, "deepspeed_plugin", None)
    return None if plugin is None else plugin.deepspeed_config


def _sizes_in(engine: Mapping[str, Any] | None) -> frozenset[str]:
    """Sizes that the file gives in numbers; "auto" and silence leave them to the plan."""
    zero = (engine or {}).get("zero_optimization") or {}
    return frozenset(name for name in SIZES if zero.get(name, "auto") != "auto")


def _model_keys(args: Any, asked: Asked) -> dict[str, Any]:
    """Under the names of TRL's ModelConfig; `dtype` None if it was left open."""
    is_loaded = not isinstance(asked.model, str)
    keys = {
        "dtype": str(next(_bare(asked.model).parameters()).dtype) if is_loaded else _loading(args).get("dtype"),
        "use_peft": False,
        "reward_model": asked.reward_model == "copy",
        "reward_adapter": asked.reward_model == "adapter",
        "value_model": asked.has_value_model,
    }
    lora = asked.peft_config
    if lora is None and hasattr(asked.model, "peft_config"):
        lora = next(iter(asked.model.peft_config.values()))
    if not hasattr(lora, "r"):  # no adapters, or such that the formulas do not know
        return keys
    targets = lora.target_modules
    quantized = asked.quantization_config or getattr(_bare(asked.model), "quantization_method", None)
    return keys | {
        "use_peft": True,
        "load_in_4bit": bool(quantized),
        "lora_r": lora.r,
        "lora_dropout": lora.lora_dropout,
        "lora_target_modules": [targets] if isinstance(targets, str) else sorted(targets or ()),
    }


def _prompt_tokens(args: Any, asked: Asked) -> int:
    if args.memory_prompt_length:
        return int(args.memory_prompt_length)
    rows = asked.dataset
    if "input_ids" in (getattr(rows, "column_names", None) or ()):
        return max(map(len, rows["input_ids"]), default=GUESSED_PROMPT)
    prompts = sorted(sample_of_prompts(rows), key=lambda prompt: len(str(prompt)))[-NUM_LONGEST:]
    if not prompts:
        return GUESSED_PROMPT
    tokenizer = asked.tokenizer or AutoTokenizer.from_pretrained(
        asked.model if isinstance(asked.model, str) else _bare(asked.model).config._name_or_path
    )
    return max(_num_tokens(getattr(tokenizer, "tokenizer", tokenizer), prompt) for prompt in prompts)


def _num_tokens(tokenizer: Any, prompt: Any) -> int:
    if isinstance(prompt, list):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(prompt)["input_ids"])


# The plan into the run --------------------------------------------------------------------------------------------


def apply(job: Job, args: Any, run: Run) -> dict[str, tuple[Any, Any]]:
    """Write a plan's settings into the arguments, DeepSpeed's among them.

    Args:
        job: The plan's.
        args: The trainer's config.
        run: As it was before.

    Returns:
        What changed: name -> (before, now).
    """
    before = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    changes = {}
    for name, value in _wanted(job, args, run).items():
        current = getattr(args, name)
        if value != current:
            setattr(args, name, value)
            changes[name] = (current, value)
    if hasattr(args, "generation_batch_size"):
        # TRL counts the completions of a generation when the config is made.
        args.generation_batch_size = args.per_device_train_batch_size * args.world_size * args.steps_per_generation
    _tell_engine(job, args, before)
    return changes


def _wanted(job: Job, args: Any, run: Run) -> dict[str, Any]:
    """Arguments by name: those of the plan's fields that differ from the run's, and what follows from them."""
    keys, fields = settings.recipe(job, "", args.world_size), run.fields
    wanted = {
        name: value
        for name, value in keys.items()
        if name not in ("bf16", "optim") and hasattr(args, name)
        if name not in fields or fields[name] != getattr(job, name)
    }
    if "dtype" not in run.given:
        wanted["model_init_kwargs"] = {**_loading(args), "dtype": job.dtype}
    if job.checkpoint_every != fields["checkpoint_every"]:
        wanted |= _checkpointing(args, job.checkpoint_every)
    if job.optim != fields["optim"]:
        wanted["optim"] = type(args.optim)(job.optim)
    if hasattr(args, "steps_per_generation"):
        wanted["steps_per_generation"] = job.steps_per_generation or job.accumulation(args.world_size)
    if "max_completion_length" in wanted and hasattr(args, "response_length"):
        wanted["response_length"] = job.max_completion_length
    return wanted


def _checkpointing(args: Any, every: int) -> dict[str, Any]:
    """Under transformers' new name and the old one, its alias; the user's own options stay."""
    options = dict(args.gradient_checkpointing_kwargs or {})
    options.pop("every_n_layers", None)
    if every > 1:
        options["every_n_layers"] = every
    wanted = {"gradient_checkpointing": every > 0, "gradient_checkpointing_kwargs": options or None}
    newer = {name.replace("gradient", "activation"): value for name, value in wanted.items()}
    return wanted | {name: value for name, value in newer.items() if hasattr(args, name)}


def _tell_engine(job: Job, args: Any, before: tuple[int, int]) -> None:
    """DeepSpeed's file was filled from the arguments when the config was made."""
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


def _with_adapters(plan: Plan, asked: Asked) -> Asked:
    """Adapters and a 4-bit base where the plan has them by the user's word."""
    job = plan.job
    if "lora" in plan.opt_ins or "qlora" in plan.opt_ins:
        from peft import LoraConfig

        targets = "all-linear" if job.lora_target_modules == ALL_LINEAR else list(job.lora_target_modules)
        task = "SEQ_CLS" if job.trainer == "reward" else "CAUSAL_LM"
        lora = LoraConfig(r=job.lora_r, lora_alpha=2 * job.lora_r, target_modules=targets, task_type=task)
        asked = replace(asked, peft_config=lora)
    if "qlora" in plan.opt_ins:
        from transformers import BitsAndBytesConfig

        base = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="bfloat16",
        )
        asked = replace(asked, quantization_config=base)
    return asked


def _told(plan: Plan, changes: Mapping[str, tuple[Any, Any]], advice: str) -> str:
    """For the user, in two or three lines."""
    found, hardware = plan.estimate, plan.estimate.case.hardware
    lines = [
        f"Memory plan for {found.case.shape.name} on {hardware}: {plan.label}. {gib(found.need_bytes):.1f} of "
        f"{hardware.card.usable_gib:.1f} GiB a card, about {found.step_s:.0f} s a step (estimated)."
    ]
    shown = {name: new for name, (_, new) in changes.items() if not name.startswith("activation_checkpointing")}
    if shown:
        lines.append("Set by it: " + ", ".join(f"{name}={value}" for name, value in shown.items()) + ".")
    return "\n".join([*lines, advice] if advice else lines)
