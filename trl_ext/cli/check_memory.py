"""What `trl-ext check` asks about memory: the recipe as a job of the planner, on the cards that it will have."""

from typing import Any

from trl_ext.cli.check_data import Lengths
from trl_ext.cli.check_recipe import HIDDEN_SQUARED, Launch, Parsed
from trl_ext.memory.cards import Hardware, parse_gpus
from trl_ext.memory.doctor.finding import Finding, note, ok, problem
from trl_ext.memory.job import Job
from trl_ext.memory.phases import PHASE_WORDS
from trl_ext.memory.planner import Plans, plan
from trl_ext.memory.settings import ALLOCATOR
from trl_ext.memory.shapes import ALL_LINEAR, ModelShape
from trl_ext.memory.units import gib

SUBJECT = "memory"
GUESSED_PROMPT = 512  # a prompt's length is rounded up to a multiple of this
# What the planner may turn, in the advice for a recipe that does not fit.
OPEN = frozenset(
    "per_device_train_batch_size steps_per_generation checkpoint_every activation_offloading dtype zero_stage offload "
    "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode".split()
)
# The shipped launch file of a stage and an offload.
FILES = {(0, "none"): "multi_gpu", (1, "none"): "zero1", (2, "none"): "zero2", (3, "none"): "zero3"}
FILES |= {(2, "optimizer"): "zero2_offload", (3, "all"): "zero3_offload"}


def machine(gpus: str | None, gpu_memory_gib: float | None) -> Hardware | None:
    """The cards to plan for: those named, else those of this machine; None if it has none.

    Raises:
        ConfigError: An unknown card.
    """
    from trl_ext.memory.doctor.look import host_memory, look_at_cards
    from trl_ext.memory.doctor.machine import hardware_of

    if gpus is not None:
        return parse_gpus(gpus, gpu_memory_gib)
    cards = look_at_cards()
    if not cards.gpus:
        return None
    return hardware_of(cards.gpus, cards.has_nvlink, cards.has_peer_access, host_memory()[1])


def check_memory(
    parsed: Parsed,
    shape: ModelShape,
    hardware: Hardware | None,
    num_processes: int,
    launch: Launch,
    prompt_length: tuple[int | None, Lengths | None],
) -> list[Finding]:
    """Does the recipe fit, and if not, what would.

    Args:
        prompt_length: The user's word, and what the rows say.

    Raises:
        ConfigError: What the planner says about settings that cannot work.
    """
    if parsed.use_cpu:
        return [note(SUBJECT, "use_cpu is true: no card to plan for.", "Remove use_cpu from the recipe for GPUs.")]
    if hardware is None:
        advice = "Say which it will have: --gpus 4xA40-48GB."
        return [note(SUBJECT, "No card was found here, so memory was not planned.", advice)]
    if num_processes > hardware.num_gpus:
        what = f"{num_processes} processes are launched, and there are {hardware.num_gpus} cards: {hardware}."
        return [problem(SUBJECT, what, "Launch one process for each card, or say which cards: --gpus.")]
    hardware = Hardware(num_processes, hardware.card, hardware.host_gib)
    settings = job_settings(parsed, shape, num_processes, launch, prompt_length)
    plans = plan(parsed.trainer, shape, hardware, **settings)
    findings = [_verdict(plans, settings, launch), *_not_modelled(parsed)]
    if parsed.trainer != "reward" and prompt_length[0] is None:
        length = settings["max_prompt_length"]
        findings.append(
            note(SUBJECT, f"Planned for prompts of up to {length} tokens.", "--max_prompt_length says more.")
        )
    return findings


def _verdict(plans: Plans, settings: dict[str, Any], launch: Launch) -> Finding:
    hardware = plans.search.hardware
    if not plans.plans:
        reasons = ". ".join(refusal.reason for refusal in plans.refused[:3])
        return problem(SUBJECT, f"{reasons} (estimated, {hardware}).", _what_would(plans, settings))
    best = plans.best.estimate
    need, usable = gib(best.need_bytes), hardware.card.usable_gib
    what = (
        f"{need:.1f} of {usable:.1f} GiB on each of {hardware}, most {PHASE_WORDS[best.peak.phase]}; about "
        f"{best.step_s:.0f} s a step (estimated): {plans.best.label}."
    )
    file = FILES.get((best.job.zero_stage, best.job.offload))
    if launch.zero_stage is None and hardware.num_gpus > 1 and file:
        return note(SUBJECT, what, f"Launch with --config_file {file}; or say which file you launch with.")
    return ok(SUBJECT, what)


def _what_would(plans: Plans, settings: dict[str, Any]) -> str:
    """The same optimisation with other settings, or what one more word to `trl-ext plan` would give."""
    search = plans.search
    # A method and an optimizer that the recipe leaves at their defaults are open to a word of the user.
    default = {("method", "full"), ("optim", "adamw_torch_fused")}
    kept = {name: value for name, value in settings.items() if name not in OPEN and (name, value) not in default}
    kept["global_batch"] = search.job.global_batch
    kept.pop("gradient_accumulation_steps", None)
    other = plan(search.job.trainer, search.shape, search.hardware, **kept)
    if other.plans:
        best = other.best
        return (
            f"The same optimisation fits as {best.label}: {gib(best.estimate.need_bytes):.1f} GiB. See `trl-ext plan`."
        )
    return " ".join(f"`trl-ext plan` with {sentence}" for sentence in other.advice) or "Take more or larger cards."


def _not_modelled(parsed: Parsed) -> list[Finding]:
    """What the formulas do not know, said rather than guessed."""
    arguments, model_args = parsed.training_args, parsed.model_args
    found = []
    if not arguments.bf16:
        found.append(note(SUBJECT, "bf16 is off; the estimate is for bf16.", "Set bf16: true on cards that have it."))
    if model_args.load_in_8bit:
        found.append(note(SUBJECT, "load_in_8bit is planned as bf16: it needs less."))
    if _optim(arguments) not in ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit"):
        found.append(note(SUBJECT, f"optim={_optim(arguments)} is planned as AdamW."))
    if getattr(arguments, "use_vllm", False) and arguments.vllm_mode == "server":
        found.append(
            note(SUBJECT, "vLLM runs as a server; its memory is not planned, and generation is counted here.")
        )
    return found


# From a recipe to a job -------------------------------------------------------------------------------------------


def job_settings(
    parsed: Parsed,
    shape: ModelShape,
    num_processes: int,
    launch: Launch,
    prompt_length: tuple[int | None, Lengths | None] = (None, None),
) -> dict[str, Any]:
    """Fields of `Job` that the recipe settles; what it leaves open, the planner chooses."""
    settings = _batch(parsed.training_args, num_processes) | _model(parsed) | _layers(parsed)
    settings |= _lengths(parsed, shape, prompt_length)
    if parsed.trainer != "reward":
        settings |= _generation(parsed)
    if parsed.trainer == "ppo":
        settings |= _ppo(parsed)
    if launch.zero_stage is not None:
        settings |= {"zero_stage": launch.zero_stage, "offload": launch.offload}
        settings |= {name: _elements(size, shape) for name, size in launch.buckets.items()}
    return settings


def _elements(size: int | str, shape: ModelShape) -> int:
    return shape.hidden**2 if size == HIDDEN_SQUARED else int(size)


def _batch(arguments: Any, num_processes: int) -> dict[str, Any]:
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    return {"per_device_train_batch_size": micro, "global_batch": micro * steps * num_processes}


def _model(parsed: Parsed) -> dict[str, Any]:
    model_args = parsed.model_args
    is_8bit = _optim(parsed.training_args) in ("adamw_bnb_8bit", "adamw_8bit")
    settings = {"optim": "adamw_bnb_8bit" if is_8bit else "adamw_torch_fused"}
    loads = (parsed.training_args.model_init_kwargs or {}).get("dtype", model_args.dtype) or "float32"
    settings["dtype"] = "float32" if "float32" in str(loads) else "bfloat16"  # float16 and "auto" take as much
    if not model_args.use_peft:
        return {**settings, "method": "full"}
    targets = model_args.lora_target_modules or ("q_proj", "v_proj")  # PEFT's choice for most families
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    return {
        **settings,
        "method": "qlora" if model_args.load_in_4bit else "lora",
        "lora_r": model_args.lora_r,
        "lora_dropout": model_args.lora_dropout,
        "lora_target_modules": ALL_LINEAR if "all-linear" in targets else targets,
    }


def _layers(parsed: Parsed) -> dict[str, Any]:
    arguments = parsed.training_args
    # transformers before 5.23 knows the old names alone.
    is_on = getattr(arguments, "activation_checkpointing", None) or arguments.gradient_checkpointing
    options = getattr(arguments, "activation_checkpointing_kwargs", None) or arguments.gradient_checkpointing_kwargs
    settings = {
        "checkpoint_every": int((options or {}).get("every_n_layers") or 1) if is_on else 0,
        "packing": arguments.packing,
        "max_tokens_per_forward": arguments.max_tokens_per_forward or 0,
        "expandable_segments": _expands(),
    }
    if parsed.trainer == "reward":
        settings["activation_offloading"] = bool(arguments.activation_offloading)
    return settings


def _expands() -> bool:
    """In the environment; the recipe's block `env` has been read into it."""
    import os

    return any("expandable_segments:True" in os.environ.get(name, "") for name in (*ALLOCATOR, "PYTORCH_ALLOC_CONF"))


def _lengths(parsed: Parsed, shape: ModelShape, prompt_length: tuple[int | None, Lengths | None]) -> dict[str, Any]:
    arguments = parsed.training_args
    if parsed.trainer == "reward":
        return {"max_length": arguments.max_length or shape.max_positions or Job("reward").max_length}
    given, measured = prompt_length
    completion = arguments.max_completion_length
    longest = measured.prompt if measured else 0
    rounded = max(-(-longest // GUESSED_PROMPT), 1) * GUESSED_PROMPT
    room = (shape.max_positions or rounded + completion) - completion
    return {"max_completion_length": completion, "max_prompt_length": given or max(longest, min(rounded, room), 1)}


def _generation(parsed: Parsed) -> dict[str, Any]:
    arguments = parsed.training_args
    settings = {
        "num_generations": arguments.num_generations,
        "beta": arguments.beta,
        "steps_per_generation": arguments.steps_per_generation,
        "ds3_gather_for_generation": arguments.ds3_gather_for_generation,
        "reward_model": "copy" if getattr(parsed.script_args, "reward_model_name_or_path", None) else "none",
    }
    names = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    if arguments.use_vllm and arguments.vllm_mode == "colocate":
        settings |= {"use_vllm": True, **{name: getattr(arguments, name) for name in names}}
    return settings


def _ppo(parsed: Parsed) -> dict[str, Any]:
    """`critic` is settled by then; a reward model is counted as large as the policy."""
    script_args = parsed.script_args
    kind = "adapter" if script_args.reward_adapter else "copy" if script_args.reward_model else "none"
    return {"critic": parsed.training_args.critic or "head", "reward_model": kind}


def _optim(arguments: Any) -> str:
    return str(getattr(arguments.optim, "value", arguments.optim))
