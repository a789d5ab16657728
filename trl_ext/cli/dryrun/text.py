"""What `trl-ext dryrun` prints: a table of the phases, and the verdict in sentences."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ORDER = ("load", "generate", "score", "update", "step", "weight_push")
HEADINGS = ("phase", "twin GiB", "formula GiB", "reserved GiB", "at the peak")
WORTH_SAYING_FRAC = 0.02  # by which the other policy differs
POLICIES = {True: "expandable_segments:True", False: "native segments"}


def print_answer(answer: dict[str, Any], recipe: Any, hardware: Any) -> None:
    """Print the whole answer.

    Args:
        answer: As `--json` prints it.
        recipe: The run that it is about.
        hardware: The machine.
    """
    console = Console(highlight=False)
    zero = (recipe.deepspeed or {}).get("zero_optimization", {}).get("stage")
    engine = "DDP" if hardware.num_gpus > 1 else "one process"
    if hardware.num_gpus > 1 and not recipe.has_launch:
        engine += " as no launch file is named (--config_file)"
    engine = engine if recipe.deepspeed is None else f"ZeRO-{zero}"
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
