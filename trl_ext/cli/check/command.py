"""`trl-ext check` and `trl-ext doctor`: whether a recipe will start and fit, and whether this machine can train.

The check takes seconds, without weights and without training: it parses as strictly as the script, loads the tokenizer
and eight rows, runs the rules once on these, and plans memory. A step that fails does not hide the next step. The
doctor asks PyTorch in a separate process, so that a broken one becomes a finding; its help answers at once.
"""

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from trl_ext.cli.parser import CommandParser

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
        from trl_ext.cli.check.steps import run_checks

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
