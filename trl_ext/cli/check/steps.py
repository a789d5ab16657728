"""The steps of `trl-ext check`, in the script's order; a step that fails becomes a finding and does not hide the next.

Importing this module loads PyTorch and the trainers.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.cli.check import data as check_data
from trl_ext.cli.check import memory as check_memory
from trl_ext.cli.check import models as check_models
from trl_ext.cli.check import recipe as check_recipe
from trl_ext.doctor.finding import Finding, ok, problem
from trl_ext.doctor.installed import untested_findings
from trl_ext.errors import TrlExtError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.files.launch import read_deepspeed, zero_stage
from trl_ext.trainers.base.packing import kernels_before_a_run
from trl_ext.trainers.settings.values import check_anywhere


class Report:
    """Collects findings; a step that raises adds a finding as well."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def attempt(self, subject: str, step: Callable[..., Any], *inputs: Any) -> Any:
        """Run a step and return its result; None if it failed, and the error becomes a finding."""
        try:
            return step(*inputs)
        except TrlExtError as error:
            if str(error) not in [finding.what for finding in self.findings]:
                self.findings.append(problem(subject, str(error)))
            return None

    def add(self, subject: str, step: Callable[..., list[Finding]], *inputs: Any) -> bool:
        """Add the findings of a step; return False if it failed, and the error became a finding."""
        found = self.attempt(subject, step, *inputs)
        self.findings += found or []
        return found is not None


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A recipe that could be parsed, with the cards and the launch of its run; `hardware` is None if not known."""

    parsed: check_recipe.Parsed
    hardware: Hardware | None
    launch: check_recipe.Launch
    num_processes: int


def run_checks(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Finding]:
    """Run all checks, in the script's order; raise ConfigError for invalid arguments of the command."""
    report = Report()
    report.findings += untested_findings()
    run = _read_run(report, arguments, overrides)
    if run is None:
        return report.findings
    parsed = run.parsed
    rewards = report.attempt("rewards", check_models.rewards_of, parsed) or []
    tokenizer = report.attempt("tokenizer", check_models.load_tokenizer, parsed)
    open_report = Report() if tokenizer is None else report  # a missing model is reported once
    shape = open_report.attempt("model", check_models.shape_of, parsed)
    if tokenizer is not None:
        report.findings.append(check_models.describe_tokenizer(tokenizer))
        if parsed.trainer == "ppo":
            report.attempt("models", check_models.check_scorers, parsed, tokenizer)
    rows = report.attempt("data", check_data.read_rows, parsed)
    lengths = None if rows is None else _check_rows(report, parsed, rows, rewards, tokenizer)
    if shape is not None:
        report.add(
            "memory",
            check_memory.check_memory,
            parsed,
            shape,
            run.hardware,
            run.num_processes,
            run.launch,
            (arguments.max_prompt_length, lengths),
            arguments.vllm_servers or 0,
        )
    return report.findings


def _read_run(report: Report, arguments: argparse.Namespace, overrides: Sequence[str]) -> CheckedRun | None:
    """Find the cards, parse the recipe and read its launch; None if the recipe cannot be parsed."""
    hardware = check_memory.machine(arguments.gpus, arguments.gpu_memory_gib, arguments.recipe, report.findings)
    launch = check_recipe.read_launch(arguments.config_file, arguments.recipe)
    served, overrides = check_recipe.with_servers(
        arguments.vllm_servers, arguments.recipe, arguments.trainer, overrides, hardware.num_gpus if hardware else None
    )
    left = hardware.num_gpus - served if hardware else 1
    num_processes = arguments.num_processes or launch.num_processes or left
    parsed = report.attempt(
        "recipe", check_recipe.parse, arguments.recipe, arguments.trainer, overrides, num_processes
    )
    if parsed is None:
        return None
    report.findings.append(ok("recipe", parsed.summary))
    report.attempt("settings", check_anywhere, parsed.training_args)
    report.findings.append(ok("layer kernels", kernels_before_a_run(parsed.training_args)))
    if parsed.deepspeed_file:
        engine = report.attempt("deepspeed", read_deepspeed, parsed.deepspeed_file)
        if engine is not None:
            launch = check_recipe.Launch(None, engine, is_known=True)
            report.findings.append(ok("deepspeed", f"{parsed.deepspeed_file}: ZeRO-{zero_stage(engine)}."))
    return CheckedRun(parsed, hardware, launch, num_processes)


def _check_rows(
    report: Report, parsed: check_recipe.Parsed, rows: check_data.Rows, rewards: Sequence[Any], tokenizer: Any
) -> check_data.Lengths | None:
    """Check and show the rows, and run the rules on them.

    Args:
        report: Gets the findings.
        parsed: The recipe and its overrides.
        rows: The rows that were read.
        rewards: Rule sets and reward functions of the recipe.
        tokenizer: The model's; None if it could not be loaded.

    Returns:
        Tokens of the rows; None if they could not be measured.
    """
    lengths = None
    are_good = report.add("data", check_data.check_rows, parsed, rows, rewards, tokenizer)
    report.findings += check_data.show_rows(parsed, rows, rewards, tokenizer)
    if are_good:  # rows that the run refuses may have no length
        lengths = report.attempt("data", check_data.measure, parsed, rows, tokenizer)
        report.add("lengths", check_data.check_lengths, parsed, lengths)
    report.add("rules", check_models.check_rules, parsed, rewards, rows, tokenizer)
    return lengths
