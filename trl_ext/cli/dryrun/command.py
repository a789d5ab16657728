"""`trl-ext dryrun`: the real trainer on fake tensors, without GPU and weights: where memory peaks, if it fits.

Help answers at once: the trainers are imported when a recipe is tried.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

DOES_NOT_FIT = 1  # the exit code; 2 is a user's mistake

DESCRIPTION = """\
Run your recipe's trainer for three steps on tensors without data, as rank 0 of your machine, and count every byte:
the peak of each phase, the operation and the module that reach it, the formulas beside it, and an estimate of what
CUDA's caching allocator reserves for it. No GPU, no weights, no dataset: every prompt, completion and pair has its
longest length. Takes half a minute to some minutes.

Not in the count: CUDA's context, which is taken off the card; kernels' workspaces; generation and vLLM, for which the
formulas answer. Whether segments expand is read in the environment, in the recipe's `env`, or in its plan."""
EXAMPLES = """\
examples:
  trl-ext dryrun recipe.yaml --gpus 8xA100-80GB
  trl-ext dryrun plan/recipe.yaml --trainer ppo --gpus 4xA40-48GB --max_prompt_length 1024 --json
  trl-ext dryrun recipe.yaml --gpus 8xA100-40GB --model 7B --config_file zero3

exit code 0 if it fits, 1 if it does not, 2 if the question cannot be answered"""
BEFORE_TRAINING = "load"
ORDER = ("load", "generate", "score", "update", "step", "weight_push")
HEADINGS = ("phase", "twin GiB", "formula GiB", "reserved GiB", "at the peak")
WORTH_SAYING_FRAC = 0.02  # by which the other policy differs
POLICIES = {True: "expandable_segments:True", False: "native segments"}
UNKNOWN_SHARE = 0.1  # reserved beyond what is allocated, of a model that the formulas do not know


def dryrun(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    arguments = _parser().parse_args(list(argv))
    from trl_ext.memory.cards import parse_gpus
    from trl_ext.twin.from_recipe import recipe_of

    hardware = parse_gpus(arguments.gpus, arguments.gpu_memory_gib)
    if arguments.max_prompt_length is not None and arguments.max_prompt_length < 1:
        raise ConfigError(f"--max_prompt_length is {arguments.max_prompt_length}. It must be at least 1.")
    recipe = recipe_of(
        arguments.recipe,
        hardware.num_gpus,
        arguments.trainer,
        arguments.model,
        arguments.deepspeed,
        arguments.max_prompt_length,
        arguments.config_file,
    )
    answer = _answer(recipe, hardware, arguments.recipe, arguments.timeout_s)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        print_answer(answer, recipe, hardware)
    return 0 if answer["fits"] else DOES_NOT_FIT


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-ext dryrun",
        usage="%(prog)s RECIPE.yaml --gpus NxCARD [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="recipe of trl-ext reward, grpo or ppo")
    parser.add_argument("--gpus", required=True, help="number and card: 4xA40-48GB, 8xA100-80GB, 6x4090")
    parser.add_argument("--gpu_memory_gib", type=float, help="total memory of a card that is not in the table")
    parser.add_argument(
        "--trainer", choices=("reward", "grpo", "ppo"), help="where the recipe's keys do not decide it"
    )
    parser.add_argument("--model", help="instead of the recipe's: folder, config.json, name on the hub, or such as 8B")
    parser.add_argument("--deepspeed", metavar="FILE", help="DeepSpeed's JSON or accelerate's YAML, if not in recipe")
    parser.add_argument("--config_file", help="the launch, if not the recipe's: a shipped one's name, or a file")
    parser.add_argument(
        "--max_prompt_length",
        type=int,
        help="tokens of the longest prompt (the recipe's memory_prompt_length, or 512)",
    )
    parser.add_argument("--timeout_s", type=float, default=900.0, help="seconds after which the formulas answer (900)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _answer(recipe: Any, hardware: Any, file: str, timeout_s: float) -> dict[str, Any]:
    """The answer as JSON values: peaks by phase from twin and formulas, what is reserved for them, and the verdict."""
    from trl_ext.memory.units import gib
    from trl_ext.twin.driver import run_apart
    from trl_ext.twin.from_recipe import simulation_of_recipe

    simulation, expands = simulation_of_recipe(recipe), segments_expand(file)
    estimate = _estimate(recipe, simulation, hardware, expands)
    result = run_apart(simulation, timeout_s)
    formula = {} if estimate is None else {name: gib(moment.num_bytes) for name, moment in estimate.worst.items()}
    # vLLM's share lies beside what the twin counts.
    vllm = 0.0 if estimate is None else gib(estimate.peak.terms.get("vLLM", 0.0))
    phases = _phases(result, formula, vllm)
    if not phases:
        raise ConfigError(f"{result.refusal} The formulas do not know this model either.")
    counted = {
        name: phase["formula_gib"] if phase["twin_gib"] is None else phase["twin_gib"]
        for name, phase in phases.items()
        if name != BEFORE_TRAINING
    }
    job = None if estimate is None else estimate.job
    reserved, by_other = (reserved_gib(counted, vllm, job, policy) for policy in (expands, not expands))
    for name, phase in phases.items():
        phase["reserved_gib"] = round(reserved[name], 3) if name in reserved else None
    return {
        **verdict_of(reserved, hardware.card.usable_gib, expands),
        "peak_gib": round(max(counted.values()), 3),
        "other_policy": verdict_of(by_other, hardware.card.usable_gib, not expands),
        "usable_gib": round(hardware.card.usable_gib, 3),
        "phases": phases,
        "formula_gib": estimate and round(estimate.peak_gib, 3),
        "formula_with_slack_gib": estimate and round(gib(estimate.need_bytes), 3),
        "basis": "formulas" if result.refusal else "twin",
        "refusal": result.refusal,
        "packed": result.packed,
        "num_params": result.num_params,
        "num_trained": result.num_trained,
        "seconds": result.seconds,
        "versions": dict(result.versions or {}),
    }


def reserved_gib(phases_gib: Mapping[str, float], vllm_gib: float, job: Any, expandable: bool) -> dict[str, float]:
    """Estimate what the allocator takes from the card in each phase.

    Args:
        phases_gib: Allocated at the peak of each phase, vLLM's share included, which has an allocator elsewhere.
        vllm_gib: vLLM's share.
        job: The job, for the formula of the slack; None for a model that the formulas do not know.
        expandable: True for `expandable_segments:True`, False for native segments.
    """
    from trl_ext.memory.formulas.peak import slack_share

    share = UNKNOWN_SHARE if job is None else slack_share(replace(job, expandable_segments=expandable))
    return {name: value + share * (value - vllm_gib) for name, value in phases_gib.items()}


def verdict_of(reserved: Mapping[str, float], usable_gib: float, expandable: bool) -> dict[str, Any]:
    """Whether what the phases reserve with a policy of the allocator fits on the card, as JSON values."""
    most = max(reserved.values())
    return {"fits": most <= usable_gib, "expandable_segments": expandable, "reserved_gib": round(most, 3)}


def segments_expand(recipe: str) -> bool:
    """True if the recipe's run has `expandable_segments:True`: by its plan, which lies beside it and whose launch line
    sets the variable; else by the environment, the recipe's block `env`, or `memory`, which sets it if nobody else
    does."""
    import yaml

    from trl_ext.doctor.variables import NEW_NAME, OLD_NAME
    from trl_ext.memory.files.settings import ALLOCATOR
    from trl_ext.memory.planner.folder import read_plan
    from trl_ext.scripts.arguments import split_config_flag

    path = Path(split_config_flag(["--config", recipe])[1])
    if path.name == "recipe.yaml" and (path.parent / "plan.json").is_file():
        return read_plan(path.parent).job.expandable_segments
    keys = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    by_memory = ALLOCATOR if keys.get("memory") else {}
    variables = {**by_memory, **os.environ, **(keys.get("env") or {})}
    words = (str(variables.get(name, "")).replace(" ", "").lower() for name in (OLD_NAME, NEW_NAME))
    return any("expandable_segments:true" in word for word in words)


def _phases(result: Any, formula: dict[str, float], vllm_gib: float) -> dict[str, dict[str, Any]]:
    """For each phase the twin's count, with vLLM's share while training, and the formula's."""
    from trl_ext.memory.units import gib

    phases: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*result.peaks, *formula]):
        peak = result.peaks.get(name)
        beside = 0.0 if name == BEFORE_TRAINING else vllm_gib
        phases[name] = {
            "twin_gib": None if peak is None else round(gib(peak.num_bytes) + beside, 3),
            "formula_gib": round(formula[name], 3) if name in formula else None,
            "op": "" if peak is None else peak.op,
            "module": "" if peak is None else peak.module,
        }
    return phases


def _estimate(recipe: Any, simulation: Any, hardware: Any, expands: bool) -> Any:
    """The formulas' answer; None for a model that they do not know."""
    from trl_ext.memory.formulas.estimate import quick_estimate
    from trl_ext.memory.job import check_model
    from trl_ext.memory.models.families import shape_from_config
    from trl_ext.memory.run.keys import job_of_run

    try:
        shape = shape_from_config(simulation.config, recipe.model)
    except ConfigError:
        return None
    job = job_of_run(recipe.trainer, recipe.keys, shape, recipe.num_gpus, recipe.deepspeed, recipe.prompt_tokens)
    job = replace(job, expandable_segments=expands)
    check_model(job, shape)
    return quick_estimate(job, shape, hardware)


# In words ----------------------------------------------------------------------------------------------------------


def print_answer(answer: dict[str, Any], recipe: Any, hardware: Any) -> None:
    """Print the whole answer.

    Args:
        answer: As `--json` prints it.
        recipe: The run that it is about.
        hardware: The machine.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    zero = (recipe.deepspeed or {}).get("zero_optimization", {}).get("stage")
    engine = "DDP" if hardware.num_gpus > 1 else "one process"
    if hardware.num_gpus > 1 and not recipe.has_launch:
        engine += " as no launch file is named (--config_file)"
    engine = engine if recipe.deepspeed is None else "FSDP2" if "fsdp" in recipe.deepspeed else f"ZeRO-{zero}"
    prompts = "" if recipe.trainer == "reward" else f", prompts of up to {recipe.prompt_tokens} tokens"
    console.print(f"{recipe.trainer} of {escape(recipe.model)} on {hardware}, {engine}, rank 0{prompts}")
    if answer["refusal"]:
        console.print(f"{escape(answer['refusal'])} The formulas answer.", soft_wrap=True)
    phases = answer["phases"]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if "GiB" in heading else "left")
    for name in sorted(phases, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        phase = phases[name]
        where = " in ".join(part for part in (phase["op"], phase["module"]) if part)
        values = (phase[key] for key in ("twin_gib", "formula_gib", "reserved_gib"))
        numbers = ("" if value is None else f"{value:.2f}" for value in values)
        table.add_row(name, *numbers, escape(where))
    console.print(table)
    console.print(verdict(answer), soft_wrap=True)


def verdict(answer: dict[str, Any]) -> str:
    """Say whether the run fits, with which policy of the allocator, and what the other policy would take."""
    word = "fits" if answer["fits"] else "does not fit"
    numbers = (
        f"{answer['peak_gib']:.1f} GiB allocated at the peak, {answer['reserved_gib']:.1f} reserved (estimated) with "
        f"{POLICIES[answer['expandable_segments']]}, on a card with {answer['usable_gib']:.1f} GiB usable"
    )
    counted = f"Counted in {answer['seconds']:.0f} s." if answer["seconds"] else ""
    formulas = ""
    if answer["formula_gib"] is not None:
        numbers_of_check = f"{answer['formula_gib']:.1f} GiB, {answer['formula_with_slack_gib']:.1f} with slack"
        formulas = f"By the formulas of `trl-ext check` and `plan`: {numbers_of_check}."
    other, instead = answer["other_policy"], ""
    changes = other["fits"] != answer["fits"]
    if changes or abs(other["reserved_gib"] / answer["reserved_gib"] - 1) > WORTH_SAYING_FRAC:
        ending = f", which {'fits' if other['fits'] else 'does not fit'}" if changes else ""
        policy = POLICIES[other["expandable_segments"]]
        instead = f"With {policy} {other['reserved_gib']:.1f} would be reserved{ending}."
    return " ".join(filter(None, (f"{word}: {numbers}.", instead, formulas, counted)))
