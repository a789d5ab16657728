"""`trl-ext report`: write the report of a run again, or a table that compares runs."""

from collections.abc import Sequence

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError, DataError, TrlExtError

DESCRIPTION = """\
Write the report.html of a run again, or compare runs in one table.

  trl-ext report RUN                       writes RUN/report.html, and prints its table
  trl-ext report --compare RUN RUN [RUN]   prints the last numbers of each run, and the settings that differ

RUN is the --output_dir of a run, finished or not, or one of its checkpoints."""


def report(argv: Sequence[str]) -> int:
    """Write a run's report again and print its table, or print a table of several runs."""
    parser = CommandParser("trl-ext report", description=DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="compare two or more runs in one table")
    arguments = parser.parse_args(list(argv))
    if bool(arguments.run) == bool(arguments.compare):
        raise ConfigError("Give one run for its report, or two or more after --compare: trl-ext report --compare A B.")
    from trl_ext.monitor.compare import compare_runs
    from trl_ext.monitor.pages.report import print_report, table_of, write_report
    from trl_ext.monitor.record import read_log_history

    try:
        if arguments.compare:
            from rich.console import Console

            Console().print(table_of(compare_runs(arguments.compare)))
        else:
            print_report(arguments.run, read_log_history(arguments.run), write_report(arguments.run))
    except TrlExtError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"A recipe, rules, versions, plan or log in {arguments.run or ' '.join(arguments.compare)} has values "
            f"that no run writes ({type(error).__name__}: {' '.join(str(error).split())}). Restore them."
        ) from error
    return 0
