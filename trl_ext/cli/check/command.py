"""`trl-ext check` and `trl-ext doctor`: whether a recipe will start and fit, and whether this machine can train.

The check takes seconds, without weights and without training: it parses as strictly as the script, loads the tokenizer
and eight rows, runs the rules once on these, and plans memory. A step that fails does not hide the next step. The
doctor asks PyTorch in a separate process, so that a broken one becomes a finding; its help answers at once.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import TrlExtError

CANNOT_WORK = 1  # the exit code for a problem; 2 is a user's mistake

DESCRIPTION = """\
Check a recipe before it costs a GPU hour: keys and values, tokenizer, eight rows of the data, the rules on those rows,
and memory. Loads no weights. Keys of the recipe may follow as flags, as in training."""
EXAMPLES = """\
examples:
  trl-ext check recipe.yaml --gpus 4xA40-48GB
  trl-ext check quickstart --trainer grpo --model_name_or_path ./model --dataset_name ./data --num_processes 2
  trl-ext check gsm8k-grpo-8x40gb --gpus 8xA100-40GB --config_file zero3
  trl-ext check gsm8k-grpo-4x-ahead --gpus 4xA100-40GB --vllm_servers 2
  trl-ext check plan/recipe.yaml --dataset_name ./data --max_steps 10

exit code 0 if the run can start, 1 if something prevents it, 2 if the command line is wrong"""
DOCTOR = """\
Check this machine: cards and their links, driver, versions, attention backends, compiler, host memory, disks, and
environment variables that slow training down or break it. Changes nothing."""
DOCTOR_EXAMPLES = """\
examples:
  trl-ext doctor
  trl-ext plan --trainer grpo --model 8B --gpus 8xA100-80GB --write plan && trl-ext doctor --plan plan

exit code 0 if training can work; 1 if something prevents it, such as a package outside its window or a plan that
cannot run here; 2 if the command line is wrong or the plan cannot be read"""
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}


def check(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    arguments, overrides = _parser().parse_known_args(list(argv))
    from trl_ext.doctor.finding import note
    from trl_ext.memory.models.find import OFFLINE, leave_a_silent_hub

    findings: list[Any] = []
    # Comes before the imports: each library would wait half a minute for a hub that does not answer.
    if reason := leave_a_silent_hub():
        advice = f"Name a mirror, HF_ENDPOINT=URL; or set {OFFLINE}=1, and give folders."
        findings.append(note("hub", f"{reason}: only local files are checked.", advice))
    from transformers.utils import logging

    from trl_ext.scripts.process import LIBRARIES

    logging.set_verbosity_error()
    # Users cannot act on these warnings; others, ours among them, are shown.
    warnings.filterwarnings("ignore", category=FutureWarning, module=LIBRARIES)
    with redirect_stdout(sys.stderr):  # libraries print at import, and --json must print JSON only
        findings += run_checks(arguments, overrides)
    return _report(findings, arguments.json)


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-ext check",
        usage="%(prog)s RECIPE [--trainer {grpo,ppo,reward}] [--gpus NxCARD] [--KEY VALUE ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        takes_more=True,  # keys of the recipe
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML recipe, or the name of a shipped recipe; comes first")
    parser.add_argument("--trainer", choices=("grpo", "ppo", "reward"), help="default: guessed from the recipe's keys")
    parser.add_argument(
        "--gpus", help="cards to plan for, such as 4xA40-48GB (default: this machine's, else the recipe's)"
    )
    purpose = "memory of one card in GiB, for a card of --gpus that is not in the table"
    parser.add_argument("--gpu_memory_gib", type=float, help=purpose)
    parser.add_argument("--num_processes", type=int, help="training processes (default: one for each card)")
    purpose = "launch file, or the name of a shipped one such as zero3 (default: the recipe's)"
    parser.add_argument("--config_file", help=purpose)
    purpose = "vLLM servers that the run starts; they take cards of --gpus (default: none)"
    parser.add_argument("--vllm_servers", type=int, help=purpose)
    purpose = "tokens of the longest prompt, for the memory plan (default: guessed from the rows)"
    parser.add_argument("--max_prompt_length", type=int, help=purpose)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


class Report:
    """Collects findings; a step that raises adds a finding as well."""

    def __init__(self) -> None:
        self.findings: list[Any] = []

    def attempt(self, subject: str, step: Callable[..., Any], *inputs: Any) -> Any:
        """Run a step and return its result; None if it failed, and the error becomes a finding."""
        from trl_ext.doctor.finding import problem

        try:
            return step(*inputs)
        except TrlExtError as error:
            if str(error) not in [finding.what for finding in self.findings]:
                self.findings.append(problem(subject, str(error)))
            return None


def run_checks(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Any]:
    """Run all checks, in the script's order; raise ConfigError for invalid arguments of the command."""
    from trl_ext.cli.check import data as check_data
    from trl_ext.cli.check import memory as check_memory
    from trl_ext.cli.check import models as check_models
    from trl_ext.cli.check import recipe as check_recipe
    from trl_ext.doctor.finding import ok
    from trl_ext.doctor.installed import untested_findings
    from trl_ext.memory.files.launch import read_deepspeed, zero_stage
    from trl_ext.trainers.base.packing import kernels_before_a_run
    from trl_ext.trainers.settings.values import check_anywhere

    report = Report()
    report.findings += untested_findings()
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
        return report.findings
    report.findings.append(ok("recipe", parsed.summary))
    report.attempt("settings", check_anywhere, parsed.training_args)
    report.findings.append(ok("layer kernels", kernels_before_a_run(parsed.training_args)))
    if parsed.deepspeed_file:
        engine = report.attempt("deepspeed", read_deepspeed, parsed.deepspeed_file)
        if engine is not None:
            launch = check_recipe.Launch(None, engine, is_known=True)
            report.findings.append(ok("deepspeed", f"{parsed.deepspeed_file}: ZeRO-{zero_stage(engine)}."))

    rewards = report.attempt("rewards", check_models.rewards_of, parsed)
    tokenizer, described = report.attempt("tokenizer", check_models.load_tokenizer, parsed) or (None, None)
    told = report if tokenizer is not None else Report()  # a missing model is reported once
    shape = told.attempt("model", check_models.shape_of, parsed)
    if described is not None:
        report.findings.append(described)
    if parsed.trainer == "ppo" and tokenizer is not None:
        report.attempt("models", check_models.check_scorers, parsed, tokenizer)
    rows = report.attempt("data", check_data.read_rows, parsed)
    measured = None
    if rows is not None:
        are_good = report.attempt("data", check_data.check_rows, parsed, rows, rewards or [], tokenizer)
        report.findings += are_good or []
        report.findings += check_data.show_rows(parsed, rows, rewards or [], tokenizer)
        if are_good:  # rows that the run refuses may have no length
            measured = report.attempt("data", check_data.measure, parsed, rows, tokenizer)
            report.findings += report.attempt("lengths", check_data.check_lengths, parsed, measured) or []
        of_rules = report.attempt("rules", check_models.check_rules, parsed, rewards or [], rows, tokenizer)
        report.findings += of_rules or []
    if shape is not None:
        of_memory = report.attempt(
            "memory",
            check_memory.check_memory,
            parsed,
            shape,
            hardware,
            num_processes,
            launch,
            (arguments.max_prompt_length, measured),
            arguments.vllm_servers or 0,
        )
        report.findings += of_memory or []
    return report.findings


# This machine -------------------------------------------------------------------------------------------------------


def doctor(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    parser = CommandParser("trl-ext doctor", description=DOCTOR, epilog=DOCTOR_EXAMPLES)
    parser.add_argument("--plan", metavar="PLAN", help="check that this plan can run here: plan.json, or its folder")
    parser.add_argument("--output_dir", default=".", help="folder for the run's output (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    arguments = parser.parse_args(list(argv))
    from trl_ext.doctor import examine, look

    plan = None
    if arguments.plan is not None:
        from trl_ext.memory import read_plan

        plan = read_plan(arguments.plan)
    facts = look(arguments.output_dir)
    findings = examine(facts, plan)
    return _report(findings, arguments.json, facts=asdict(facts))


def _report(findings: Sequence[Any], as_json: bool, **more: Any) -> int:
    """Print the findings, as JSON with `more`, and return the exit code."""
    from trl_ext.doctor.finding import all_well

    is_well, said = all_well(findings), [asdict(finding) for finding in findings]
    if as_json:
        print(json.dumps({"ok": is_well, "findings": said, **more}, indent=2))
    else:
        print_findings(findings)
    return 0 if is_well else CANNOT_WORK


def print_findings(findings: Iterable[Any]) -> None:
    """Print a line for each finding, with its remedy."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from trl_ext.monitor.words import visible

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        words = visible(f"{finding.what} {finding.advice}".strip())  # rows of a dataset may be quoted
        table.add_row(MARKS[finding.level], escape(finding.subject), escape(words))
    Console(highlight=False).print(table)
