"""`trl-ext score`: check rules on data, on a completion, and against known cheats, without a model.

Rules and data are imported when a command runs, so that help answers at once.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError, RuleError
from trl_ext.monitor.words import visible

NOT_OK = 1  # the exit code for a check that found something; 2 is a user's mistake

DESCRIPTION = "Check rules before they train a model, and what they gave while they did. Needs no model and no GPU."
AUDIT = """\
Check that rules and data fit: for every row, each rule that judges correctness must give its full value to the gold
answer of that row, and less to gold answers of other rows. Exit code 1 if a row fails, or cannot be used in training
because its gold answer cannot be read or leaves other answers undecided. Also shows in which forms (box, tag, phrases)
the rules pay the gold answers."""
AUDIT_EXAMPLE = """\
example:
  trl-ext score audit rules.yaml train.jsonl --limit 2000"""
EXPLAIN = """\
Explain the reward of a completion: score one row of the table that TRL writes with log_completions=True
(output_dir/completions/*.parquet), or of any file with the columns prompt and completion."""
EXPLAIN_EXAMPLE = """\
The table of a run holds the columns that its rules read, with long cells cut. For other tables, or for cut cells, give
the dataset as --data: the row with the same prompt is used.
Rules that count tokens use the tokenizer of the run whose folder holds the table.

examples:
  trl-ext score explain out/rules.yaml out/completions/completions_00010.parquet --row 17
  trl-ext score explain rules.yaml out/completions/completions_00010.parquet --row 17 --data train.jsonl
  trl-ext score explain rules.yaml samples.jsonl --row 3"""
REDTEAM = """\
Try known cheats. Scores completions that deserve nothing (empty tags, hidden answers, a copy of the prompt, programs
that exit) and compares them with an honest attempt that fails. Also scores texts with the answers of three rows, which
may earn the reward of one answer only. Exit code 1 if a cheat earns a reward."""
REDTEAM_EXAMPLE = """\
examples:
  trl-ext score redteam rules.yaml train.jsonl
  trl-ext score redteam rules.yaml train.jsonl --shape 'Thoughts: [text] Answer: [answer]'"""

SERVE = """\
Serve rewards to other programs over HTTP: POST /score with completions and columns, or NeMo-Gym's /verify. Accepts
requests from this machine only, unless a token is given. Ctrl-C ends it."""
SERVE_EXAMPLE = """\
example:
  trl-ext score serve rules.yaml --port 8300
  trl-ext score serve rules.yaml --host 0.0.0.0 --token_env REWARD_TOKEN"""


def score(argv: Sequence[str]) -> int:
    """Run one of the commands, and return the exit code."""
    parser = CommandParser("trl-ext score", description=DESCRIPTION)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_audit(_command(commands, "audit", "check that rules and data fit", AUDIT, AUDIT_EXAMPLE, run_audit))
    _add_explain(
        _command(commands, "explain", "explain a reward, rule by rule", EXPLAIN, EXPLAIN_EXAMPLE, run_explain)
    )
    _add_redteam(
        _command(commands, "redteam", "check that cheats earn nothing", REDTEAM, REDTEAM_EXAMPLE, run_redteam)
    )
    _add_serve(_command(commands, "serve", "serve rewards over HTTP", SERVE, SERVE_EXAMPLE, run_serve))
    arguments = parser.parse_args(list(argv))
    if arguments.run is None:
        parser.print_help()
        return 0
    from trl_ext.rewards import RuleSet

    run: Callable[[Any, argparse.Namespace], int] = arguments.run
    return run(RuleSet.from_yaml(arguments.rules), arguments)


def _command(
    commands: Any,
    name: str,
    purpose: str,
    description: str,
    epilog: str,
    run: Callable[[Any, argparse.Namespace], int],
) -> CommandParser:
    """Add a command that reads a YAML file of rules, and return its parser for further flags.

    Args:
        commands: The sub-commands of `trl-ext`, from argparse.
        name: Word after `trl-ext`.
        purpose: Line in the list of commands.
        description, epilog: Text above and below the flags in the command's help.
        run: Runs the command with its parser and arguments, and returns the exit code.
    """
    parser: CommandParser = commands.add_parser(name, help=purpose, description=description, epilog=epilog)
    parser.add_argument("rules", metavar="RULES", help="YAML file with the rules")
    parser.set_defaults(run=run)
    return parser


def _add_audit(parser: CommandParser) -> None:
    parser.add_argument("data", metavar="DATA", help="jsonl, json, csv or parquet file, or a dataset's folder")
    _add_data_options(parser, limit=None)
    parser.add_argument(
        "--others", type=int, default=3, help="gold answers of other rows to try on each row (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of those other rows (default 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_explain(parser: CommandParser) -> None:
    parser.add_argument("completions", metavar="COMPLETIONS", help="parquet, jsonl, json or csv file")
    parser.add_argument("--row", type=int, required=True, help="number of the row, from 0")
    purpose = "dataset with the columns that the rules read, if the table lacks them; rows are matched by prompt"
    parser.add_argument("--data", help=purpose)
    parser.add_argument("--split", default="train", help="split to read if --data is a folder (default train)")
    purpose = "model name or folder whose tokenizer counts tokens for the rules (default: the run's tokenizer)"
    parser.add_argument("--tokenizer", help=purpose)


def _add_redteam(parser: CommandParser) -> None:
    parser.add_argument(
        "data", metavar="DATA", help="rows to try the cheats on: jsonl, json, csv or parquet file, or a folder"
    )
    _add_data_options(parser, limit=20)
    purpose = "the form of an honest completion, with [text] and [answer], if the rules expect one"
    parser.add_argument("--shape", help=purpose)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_serve(parser: CommandParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; others need a token (default 127.0.0.1)"
    )
    parser.add_argument(
        "--token_env", metavar="NAME", help="environment variable with the token that requests must send"
    )
    parser.add_argument("--port", type=int, default=8300, help="port; 0 takes a free port (default 8300)")
    parser.add_argument("--max_mib", type=int, default=16, help="size limit of a request, in MiB (default 16)")


def _add_data_options(parser: CommandParser, limit: int | None) -> None:
    default = "all" if limit is None else limit
    parser.add_argument(
        "--limit", type=int, default=limit, help=f"read only so many rows, from the first (default {default})"
    )
    parser.add_argument("--split", default="train", help="split to read if DATA is a folder (default train)")


def run_audit(rules: Any, arguments: argparse.Namespace) -> int:
    """Run `trl-ext score audit`."""
    from trl_ext.cli.score.rows import read_data
    from trl_ext.rewards.auditing.audit import audit

    data = read_data(arguments.data, arguments.split, arguments.limit)
    return _printed(audit(rules, data, arguments.others, arguments.seed), arguments.json)


def run_redteam(rules: Any, arguments: argparse.Namespace) -> int:
    """Run `trl-ext score redteam`."""
    from trl_ext.cli.score.rows import read_data
    from trl_ext.rewards.auditing.redteam import redteam

    rows = read_data(arguments.data, arguments.split, arguments.limit)
    return _printed(redteam(rules, rows, arguments.shape), arguments.json)


def _printed(report: Any, as_json: bool) -> int:
    print(json.dumps(report.as_dict(), ensure_ascii=True, indent=2) if as_json else visible(str(report)))
    return 0 if report.ok else NOT_OK


def run_explain(rules: Any, arguments: argparse.Namespace) -> int:
    """Run `trl-ext score explain`."""
    from trl_ext.cli.score.rows import (
        columns_of,
        dependencies,
        group_of,
        heading,
        ids_of,
        logged,
        tokenizer_of_run,
    )
    from trl_ext.rewards import completion_text
    from trl_ext.rewards.base.rows import as_columns, make_rows

    group, place = group_of(arguments.completions, arguments.row)
    row = group[place]
    text = completion_text(row["completion"])
    columns = columns_of(rules, row, arguments.data, arguments.split)
    tokenizer = arguments.tokenizer
    if tokenizer is None and any(getattr(rule, "unit", None) == "tokens" for rule in rules.rules):
        tokenizer = tokenizer_of_run(arguments.completions)
    ids = ids_of(group, tokenizer)
    # Rows with equal prompts share a row of the dataset.
    cells = [columns if arguments.data else columns_of(rules, one, None, "") for one in group]
    rows = make_rows(
        [one.get("prompt") for one in group],
        [one["completion"] for one in group],
        ids,
        as_columns(cells, columns),
        row.get("step"),
        row.get("prompt_end") or "",
        grouped=rules.reads_group,
    )
    try:
        found = rules.explain_row(rows[place])
    except RuleError as error:
        if ids[place] is not None or "completion_ids" not in str(error):
            raise
        raise ConfigError(f"{error} On the command line: --tokenizer MODEL.") from error
    parts = [heading(row, text), str(found), dependencies(rules, columns), logged(rules, row, found)]
    print(visible("\n\n".join(filter(None, parts))))
    return 0


def run_serve(rules: Any, arguments: argparse.Namespace) -> int:
    """Run `trl-ext score serve`."""
    import signal

    from trl_ext.rewards.adapters.server import RewardServer

    if arguments.max_mib < 1:
        raise ConfigError(f"--max_mib is {arguments.max_mib}. Give at least 1.")
    # Other users can read command lines, so no option takes the token itself.
    token = os.environ.get(arguments.token_env, "").strip() if arguments.token_env else ""
    if arguments.token_env and not token:
        raise ConfigError(
            f"{arguments.token_env} holds no token. Put one there, such as the output of: openssl rand -hex 32"
        )
    for rule in rules.rules:
        if getattr(rule, "unit", "") == "tokens":
            print(
                f"Rule '{rule.name}' counts tokens: only /score can send them (completion_ids). Else use unit: words."
            )
    with RewardServer(rules, arguments.host, arguments.port, arguments.max_mib * 2**20, token) as server:
        host, port = str(server.server_address[0]), server.server_port
        print(f"Serving {arguments.rules} at http://{host}:{port}: POST /score, /verify; GET /health.", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            rules.close()
    return 0
