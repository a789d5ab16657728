"""A run ends on one problem before and after, and on commands that there are."""

import pytest

from trl_ext.cli.main import COMMANDS
from trl_ext.monitor.ending import ending, same_problem

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "0 + 3 = ?"}]


def write(folder, step, rows):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "completions").mkdir(exist_ok=True)
    table = pa.table({"step": [step] * len(rows), "prompt": [p for p, _ in rows], "completion": [c for _, c in rows]})
    parquet.write_table(table, folder / "completions" / f"completions_{step:05}.parquet")


def said(text):
    return [{"role": "assistant", "content": text}]


def test_the_first_problem_of_both_evaluations_is_shown(tmp_path):
    other = [{"role": "user", "content": "1 + 1 = ?"}]
    write(tmp_path, 0, [(ASKED, said("who knows")), (ASKED, said("4")), (other, said("11"))])
    write(tmp_path, 1, [(other, said("in between"))])
    write(tmp_path, 100_000, [(other, said("2")), (ASKED, said("0 + 3 = 3")), (ASKED, said("3"))])
    assert same_problem(tmp_path) == ("0 + 3 = ?", "who knows", "0 + 3 = 3")


def test_without_a_problem_in_both_tables_nothing_is_shown(tmp_path):
    assert same_problem(tmp_path) is None
    write(tmp_path, 0, [("one", "1")])
    assert same_problem(tmp_path) is None
    write(tmp_path, 1, [("two", "2")])
    assert same_problem(tmp_path) is None
    (tmp_path / "completions" / "completions_00002.parquet").write_bytes(b"cut off")
    assert same_problem(tmp_path) is None
    assert ending(tmp_path, "grpo")[0] == "Next:"


def test_a_completion_stays_one_line_that_no_terminal_obeys(tmp_path):
    write(tmp_path, 0, [("p", "a\x1b[2J\n" + "b" * 1000)])
    write(tmp_path, 1, [("p", "\u202ec")])
    lines = ending(tmp_path, "grpo")
    assert lines[0] == "One problem: p" and lines[2] == "After:       c"
    assert lines[1].isprintable() and len(lines[1]) < 200 and " ... " in lines[1]


def test_what_comes_next_are_commands_that_there_are(tmp_path):
    for kind, commands in (("grpo", ["report", "evaluate", "recipes"]), ("reward", ["report", "recipes"])):
        lines = ending(tmp_path, kind)
        named = [line.split()[1] for line in lines if line.startswith("  trl-ext ")]
        assert named == commands and set(named) <= set(COMMANDS), kind
