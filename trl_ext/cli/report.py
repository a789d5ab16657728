"""`trl-ext report`: the page of a run again, or a page that compares runs."""

from collections.abc import Sequence

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

DESCRIPTION = """\
Write a run's report.html again, or compare runs on one page.

  trl-ext report RUN                       writes RUN/report.html, and prints its table
  trl-ext report --compare RUN RUN [RUN]   writes comparison.html: curves over each other, numbers, what differs

A run is its --output_dir, finished or not, or one of its checkpoints."""


def report(argv: Sequence[str]) -> int:
    """Write a run's report again and print its table, or write a comparison."""
    parser = CommandParser("trl-ext report", description=DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="two runs or more, on one page")
    parser.add_argument("--output", metavar="FILE", help="the page of --compare (default comparison.html)")
    arguments = parser.parse_args(list(argv))
    if bool(arguments.run) == bool(arguments.compare):
        raise ConfigError("Give one run for its report, or two or more after --compare: trl-ext report --compare A B.")
    if arguments.output and not arguments.compare:
        raise ConfigError("--output is for --compare: a run's own report is its report.html. Leave it out.")
    if arguments.compare:
        from trl_ext.monitor.compare import COMPARISON_FILE, write_comparison

        print(f"Comparison: {write_comparison(arguments.compare, arguments.output or COMPARISON_FILE)}")
        return 0
    from rich.console import Console

    from trl_ext.monitor.report import HTML_FILE, summary_table, write_report

    console = Console()
    console.print(summary_table(write_report(arguments.run)))
    console.print(f"Report: {arguments.run.rstrip('/')}/{HTML_FILE}", soft_wrap=True, markup=False, highlight=False)
    return 0
