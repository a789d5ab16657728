"""What `trl-ext check` asks about memory: the recipe as a job of the planner, on the cards that it will have."""

from typing import Any

from trl_ext.cli.check.data import Lengths
from trl_ext.cli.check.recipe import Launch, Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.memory.cards import Hardware, parse_gpus
from trl_ext.memory.formulas.phases import PHASE_WORDS
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.planner import Plans, plan
from trl_ext.memory.run.fields import BNB_ADAM, FREE, given_fields, optimizer_name, run_fields
from trl_ext.memory.run.settle import FILES
from trl_ext.memory.units import gib

SUBJECT = "memory"
GUESSED_PROMPT = 512  # a prompt's length is rounded up to a multiple of this


def machine(gpus: str | None, gpu_memory_gib: float | None) -> Hardware | None:
    """The cards to plan for: those named, else those of this machine; None if it has none.

    Raises:
        ConfigError: An unknown card.
    """
    from trl_ext.doctor.look import host_memory, look_at_cards
    from trl_ext.doctor.machine import hardware_of

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
    if not launch.is_known and hardware.num_gpus > 1 and file:
        return note(SUBJECT, what, f"Launch with --config_file {file}; or say which file you launch with.")
    return ok(SUBJECT, what)


def _what_would(plans: Plans, settings: dict[str, Any]) -> str:
    """The same optimisation with other settings, or what one more word to `trl-ext plan` would give."""
    search = plans.search
    # A method and an optimizer that the recipe leaves at their defaults are open to a word of the user.
    default = {("method", "full"), ("optim", "adamw_torch_fused")}
    kept = {name: value for name, value in settings.items() if name not in FREE and (name, value) not in default}
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
    optim = optimizer_name(vars(arguments))
    if optim not in ("adamw_torch", "adamw_torch_fused", *BNB_ADAM):
        found.append(note(SUBJECT, f"optim={optim} is planned as AdamW."))
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
    arguments = parsed.training_args
    keys = vars(parsed.script_args) | vars(parsed.model_args) | vars(arguments)
    prompt_tokens = None if parsed.trainer == "reward" else _prompt_tokens(arguments, shape, prompt_length)
    fields = run_fields(parsed.trainer, keys, shape, num_processes, launch.engine, prompt_tokens)
    open_ones = set() if launch.is_known else {"zero_stage", "offload"}
    if arguments.memory is not None:
        open_ones |= FREE - given_fields(arguments.given) - ({"zero_stage", "offload"} if launch.is_known else set())
    return {name: value for name, value in fields.items() if name not in open_ones}


def _prompt_tokens(arguments: Any, shape: ModelShape, prompt_length: tuple[int | None, Lengths | None]) -> int:
    given, measured = prompt_length
    longest = measured.prompt if measured else 0
    rounded = max(-(-longest // GUESSED_PROMPT), 1) * GUESSED_PROMPT
    completion = arguments.max_completion_length
    room = (shape.max_positions or rounded + completion) - completion
    return given or arguments.memory_prompt_length or max(longest, min(rounded, room), 1)
