"""`trl-ext report`: the page of a run again, or a table that compares runs."""

from collections.abc import Sequence

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

DESCRIPTION = """\
Write a run's report.html again, or compare runs in one table.

  trl-ext report RUN                       writes RUN/report.html, and prints its table
  trl-ext report --compare RUN RUN [RUN]   prints the runs' last numbers side by side, and the settings that differ

A run is its --output_dir, finished or not, or one of its checkpoints."""


def report(argv: Sequence[str]) -> int:
    """Write a run's report again and print its table, or print a table of several runs."""
    parser = CommandParser("trl-ext report", description=DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="two runs or more, in one table")
    arguments = parser.parse_args(list(argv))
    if bool(arguments.run) == bool(arguments.compare):
        raise ConfigError("Give one run for its report, or two or more after --compare: trl-ext report --compare A B.")
    from rich.console import Console

    from trl_ext.monitor.report import HTML_FILE, read_log_history, summary_table, table_of, write_report

    console = Console()
    if arguments.compare:
        from trl_ext.monitor.compare import compare_runs

        console.print(table_of(compare_runs(arguments.compare)))
        return 0
    console.print(summary_table(write_report(arguments.run), read_log_history(arguments.run)))
    console.print(f"Report: {arguments.run.rstrip('/')}/{HTML_FILE}", soft_wrap=True, markup=False, highlight=False)
    return 0
