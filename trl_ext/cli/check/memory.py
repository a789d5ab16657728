"""The part of `trl-ext check` about memory: plan the recipe on the cards of the run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trl_ext.cli.check.data import Lengths
from trl_ext.cli.check.recipe import Launch, Parsed
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.doctor.look import this_machine
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import HEADROOM_FRAC, Hardware, parse_gpus
from trl_ext.memory.files.launch import SHIPPED, read_accelerate
from trl_ext.memory.formulas.peak import PHASE_WORDS
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.choices import FREE
from trl_ext.memory.planner.keys import BNB_ADAM, GUESSED_PROMPT_TOKENS, job_of_run, optimizer_name
from trl_ext.memory.planner.run import ALL, LAUNCHED, OPTED, Run
from trl_ext.memory.planner.search import FULL_ENOUGH
from trl_ext.memory.units import gib
from trl_ext.scripts.arguments import split_config_flag
from trl_ext.trainers.fit.plan import decided

SUBJECT = "memory"


def machine(gpus: str | None, gpu_memory_gib: float | None, recipe: str, findings: list[Finding]) -> Hardware | None:
    """Return the named cards, else this machine's, else the recipe's, or None; raise ConfigError for an unknown card.

    Args:
        gpus, gpu_memory_gib: Flags of the command.
        recipe: A shipped recipe, or a copy, whose first line names its cards.
        findings: Gets a note if the cards are the recipe's.
    """
    hardware = this_machine() if gpus is None else parse_gpus(gpus, gpu_memory_gib)
    if hardware is not None:
        return hardware
    with suppress(ConfigError, OSError, UnicodeDecodeError):  # a recipe for processors, or no recipe
        text = Path(split_config_flag(["--config", recipe])[1]).read_text(encoding="utf-8")
        hardware = parse_gpus(text.partition(":")[0].partition(" on ")[2])
        what = f"No card was found here: planned for {hardware}, for which the recipe is written."
        findings.append(note(SUBJECT, what, "Name others: --gpus 4xA40-48GB."))
    return hardware


def check_memory(
    parsed: Parsed,
    shape: ModelShape,
    hardware: Hardware | None,
    num_processes: int,
    launch: Launch,
    prompt_length: tuple[int | None, Lengths | None],
    num_servers: int = 0,
) -> list[Finding]:
    """Report whether the recipe fits, and if not, what would.

    Args:
        hardware: The cards, None if none are known.
        launch: The launch, as far as it is known.
        prompt_length: Tokens of the longest prompt as the user gave them, and as measured in the rows.
        num_servers: vLLM servers of the run, on cards of `hardware`.

    Raises:
        ConfigError: The settings cannot work.
    """
    if parsed.use_cpu:
        return [note(SUBJECT, "use_cpu is true: no card to plan for.", "Remove use_cpu from the recipe for GPUs.")]
    if hardware is None:
        advice = "Name the cards of the run: --gpus 4xA40-48GB."
        return [note(SUBJECT, "No card was found here, so memory was not planned.", advice)]
    run_with = partial(
        run_of_recipe, parsed, shape, num_processes, prompt_length=prompt_length, num_servers=num_servers
    )
    run = run_with(launch)
    taken = num_processes + run.job.vllm_gpus
    if taken > hardware.num_gpus:
        servers = f", {run.job.vllm_gpus} cards serve" if num_servers else ""
        what = f"{num_processes} processes are launched{servers}, and there are {hardware.num_gpus} cards: {hardware}."
        return [problem(SUBJECT, what, "Launch one process for each card, or name the cards: --gpus.")]
    if taken < hardware.num_gpus:
        hardware = replace(hardware, num_gpus=taken, num_machines=1)
    # Without `memory` nothing changes the user's settings: they get no headroom, and a note if little is left.
    setting = parsed.training_args.memory_setting
    hardware = replace(hardware, headroom_frac=setting.kept_free_frac if setting else 0.0)
    findings = [_verdict(run, hardware, None if launch.is_known else run_with), *_not_modelled(parsed, num_servers)]
    if parsed.trainer != "reward" and prompt_length[0] is None:
        what = f"Planned for prompts of up to {run.job.max_prompt_length} tokens."
        findings.append(note(SUBJECT, what, "Raise it with --max_prompt_length."))
        longest, planned = (prompt_length[1] or Lengths()).prompt, parsed.training_args.memory_prompt_length
        if planned and longest > planned:
            what = f"A prompt has {longest} tokens, and memory_prompt_length is {planned}."
            findings.append(problem(SUBJECT, what, f"Plan again with --max_prompt_length {longest}."))
    return findings


def _verdict(run: Run, hardware: Hardware, run_with: Callable[[Launch], Run] | None) -> Finding:
    """Report what the run needs; `run_with` makes the run for a launch, None if the launch is known."""
    plans, file = run.plans(hardware), ""
    if not plans.plans:
        reasons = plans.reasons.removesuffix(".")
        otherwise = run.plans(hardware, FREE | OPTED)
        if otherwise.plans:
            need = gib(otherwise.best.estimate.need_bytes)
            advice = f"The same optimisation fits as {otherwise.best.label}: {need:.1f} GiB. See `trl-ext plan`."
        else:
            told = (f"`trl-ext plan` {'' if one.startswith('without') else 'with '}{one}" for one in otherwise.advice)
            advice = " ".join(told) or otherwise.dead_end
        return problem(SUBJECT, f"{reasons} (estimated, {hardware}).", advice)
    if run_with is not None and hardware.num_gpus > 1:
        for one in plans.plans:  # the first that a shipped file launches, with the bucket sizes of that file
            if name := SHIPPED.get((one.job.zero_stage, one.job.offload)):
                under = run_with(Launch(*read_accelerate(name), is_known=True)).plans(hardware)
                if under.plans:
                    file, plans = name, under
                    break
    best = plans.best.estimate
    what = (
        f"{best.memory} on each of {hardware} with {hardware.usable}, most {PHASE_WORDS[best.peak.phase]}; about "
        f"{best.in_seconds()} s a step (estimated, rough): {plans.best.label}."
    )
    what = f"{what} {hardware.card.assumed}".rstrip()
    if file:
        advice = (
            f"Launch with --config_file {file}, or write config_file: {file} into the recipe; or give another file."
        )
        return note(SUBJECT, what, advice)
    if gib(best.need_bytes) > hardware.fill_gib * (1 - HEADROOM_FRAC) and not hardware.headroom_frac:
        advice = (
            f"Less than {HEADROOM_FRAC:.0%} of a card stay free: the rehearsal before step 1 measures whether it fits."
        )
        return note(SUBJECT, what, advice)
    return ok(SUBJECT, what)


def _not_modelled(parsed: Parsed, num_servers: int) -> list[Finding]:
    """Return findings about settings that the formulas do not model."""
    arguments, model_args = parsed.training_args, parsed.model_args
    found = []
    if not (arguments.bf16 or arguments.fp16):
        found.append(note(SUBJECT, "bf16 is off; the estimate is for bf16.", "Set bf16: true on cards that have it."))
    if model_args.load_in_8bit:
        found.append(note(SUBJECT, "load_in_8bit is planned as bf16: it needs less."))
    optim = optimizer_name(vars(arguments))
    if optim not in ("adamw_torch", "adamw_torch_fused", *BNB_ADAM):
        found.append(note(SUBJECT, f"optim={optim} is planned as AdamW."))
    if getattr(arguments, "use_vllm", False) and arguments.vllm_mode == "server" and not num_servers:
        found.append(
            note(SUBJECT, "vLLM runs as a server; neither its memory nor the time of generation is counted here.")
        )
    return found


def run_of_recipe(
    parsed: Parsed,
    shape: ModelShape,
    num_processes: int,
    launch: Launch,
    prompt_length: tuple[int | None, Lengths | None] = (None, None),
    num_servers: int = 0,
) -> Run:
    """Return the recipe as a run of the planner, which may choose what `memory` and an unknown launch leave open.

    Args:
        parsed: The recipe.
        shape: The model's.
        num_processes: Training processes.
        launch: The launch, as far as it is known.
        prompt_length: Tokens of the longest prompt as the user gave them, and as measured in the rows.
        num_servers: vLLM servers on this machine.
    """
    arguments, engine = parsed.training_args, launch.engine
    keys = vars(parsed.script_args) | vars(parsed.model_args) | vars(arguments)
    prompt_tokens = None
    if parsed.trainer != "reward":
        given, measured = prompt_length
        longest = measured.prompt if measured else 0
        planned = arguments.memory_prompt_length
        prompt_tokens = given or max(planned or 0, longest)
        if not (given or planned):  # rounds the measured length up, within the model's positions
            rounded = max(-(-longest // GUESSED_PROMPT_TOKENS), 1) * GUESSED_PROMPT_TOKENS
            room = shape.max_positions - arguments.max_completion_length if shape.max_positions else rounded
            prompt_tokens = max(longest, min(rounded, room), 1)
    job = job_of_run(parsed.trainer, keys, shape, num_processes, engine, prompt_tokens)
    if num_servers:  # started by the launcher
        job = replace(
            job,
            vllm_servers=num_servers,
            vllm_tensor_parallel_size=arguments.vllm_tensor_parallel_size,
            vllm_gpu_memory_utilization=FULL_ENOUGH,
        )
    fixed = ALL
    if arguments.memory is not None:
        fixed = decided(job, arguments, shape, engine, has_value_model=bool(keys.get("value_model")))
    return Run(job, fixed | LAUNCHED if launch.is_known else fixed - LAUNCHED, shape, num_processes, num_processes)
