"""`trl-ext doctor`: check that this machine can train, and can run a plan; a line and a remedy for each finding.

PyTorch is asked in a separate process, so that a broken one becomes a finding; help answers at once.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trl_ext.cli.parser import CommandParser

NOT_FIT = 1  # the exit code for a problem; 2 is a user's mistake

DESCRIPTION = """\
Check this machine: cards and their links, driver, versions, attention backends, compiler, host memory, disks, and
environment variables that slow training down or break it. Changes nothing."""
EXAMPLES = """\
examples:
  trl-ext doctor
  trl-ext plan --trainer grpo --model 8B --gpus 8xA100-80GB --write plan && trl-ext doctor --plan plan

exit code 0 if training can work; 1 if something prevents it, such as a package outside its window or a plan that
cannot run here; 2 if the command line is wrong or the plan cannot be read"""
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}


def doctor(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    parser = CommandParser("trl-ext doctor", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--plan", metavar="PLAN", help="check that this plan can run here: plan.json, or its folder")
    parser.add_argument("--output_dir", default=".", help="folder for the run's output (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    arguments = parser.parse_args(list(argv))
    from trl_ext.doctor import examine, look
    from trl_ext.doctor.finding import all_well

    plan = None
    if arguments.plan is not None:
        from trl_ext.memory import read_plan

        plan = read_plan(arguments.plan)
    facts = look(arguments.output_dir)
    findings = examine(facts, plan)
    if arguments.json:
        said = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": all_well(findings), "findings": said, "facts": asdict(facts)}, indent=2))
    else:
        print_findings(findings)
    return 0 if all_well(findings) else NOT_FIT


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
