"""Code without running any: what is extracted, how tests are read, what its fields refuse."""

import json

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.isolation.sandbox.api import Outcome
from trl_ext.rewards.isolation.sandbox.cases import (
    StdioCase,
    UnreadableTests,
    cell_text,
    lines_of,
    read_cases,
    read_suite,
)
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules import code as code_module
from trl_ext.rewards.rules.code import LONGEST_CODE, Code, code_block, read_report, wrong_output


@pytest.fixture(autouse=True)
def any_level(monkeypatch):
    monkeypatch.setattr(code_module, "sandbox_level", lambda: (2, ""))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```python\nx = 2\n```\nc", "x = 2"),
        ("```Python\nx = 1\n```", "x = 1"),
        ("``` py\nx = 1\n  ```", "x = 1"),
        ("  ```python3\n  x = 1\n```", "  x = 1"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
        ("```text\n```python\n```\n", None),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        ("```python\nx = 1\n```\nand then\n```python\nx = 2", "x = 1"),
        ("<think>\n```python\nx = 0\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
        ("<think>\n```python\nx = 0\n```\n</think>\nno code", None),
        ("<think>\n```python\nx = 0\n```", None),
        ("```python\n```", ""),
        ("```\nx = 1\n```", None),
        ("x ```python\nx = 1\n```", None),
        ("```python x = 1```", None),
        ("", None),
        ("`" * 100_000, None),
        ("```\n" * 100_001, None),
    ],
)
def test_the_last_closed_python_block_behind_the_thinking_is_the_code(text, code):
    assert code_block(text) == code


def test_a_megabyte_of_fences_is_read_in_one_pass():
    assert code_block("```python\nx\n```\n" * 60_000) == "x"


@pytest.mark.parametrize(
    "cell",
    [
        [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}],
        {"inputs": ["1", "3"], "outputs": ["2", "4\n"]},
        '[{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]',
        '{"inputs": ["1", "3"], "outputs": ["2", "4"]}',
    ],
)
def test_every_shape_of_cases_is_read(cell):
    assert read_cases(cell_text(cell)) == (StdioCase("1", ("2",)), StdioCase("3", ("4",)))


@pytest.mark.parametrize(
    "cell",
    [
        None,
        "",
        [],
        {},
        5,
        float("nan"),
        "no JSON",
        "[" * 100_000,
        [{"input": "1"}],
        [{"input": 1, "output": 2}],
        {"inputs": ["1"], "outputs": []},
        {"inputs": "1", "outputs": "2"},
        ["assert f(1)"],
        [None],
        {1: 2, (3,): 4},
    ],
)
def test_cells_that_are_no_cases_are_refused(cell):
    with pytest.raises(UnreadableTests, match="is not a list of"):
        read_cases(cell_text(cell))


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("1\n2\n", ("1", "2")),
        ("1 \n2\t\r\n\n\n", ("1", "2")),
        ("\n1", ("", "1")),
        ("1\n\n2", ("1", "", "2")),
        (" 1", (" 1",)),
        ("", ("",)),
    ],
)
def test_only_trailing_white_space_of_an_output_is_ignored(output, lines):
    assert lines_of(output) == lines


@pytest.mark.parametrize(
    "output", ["1\n2", "1\n2\n3\n4", "1\n3\n2", "1 2 3", "", "0\n1\n2\n3", "\n1\n2\n3", "1\n2\n3\n."]
)
def test_only_the_whole_output_is_right(output):
    assert wrong_output(Outcome("exit", output=output.encode()), ("1", "2", "3"))
    assert not wrong_output(Outcome("exit", output=b"1\n2 \n3\n"), ("1", "2", "3"))


def test_a_suite_counts_its_outermost_asserts():
    text = "import math\nfor i in range(3):\n    assert f(i)\nassert f(3)\nassert f(4)\n"
    assert read_suite(text, None).num_tests == 2
    assert read_suite(json.dumps(["x = 1", "assert f(x)"]), None).steps == (
        ("x = 1", "prepare"),
        ("assert f(x)", "test"),
    )


def test_a_check_function_counts_where_an_entry_point_is_known():
    text = "def check(candidate):\n    assert candidate(1)\n"
    assert read_suite(text, "f").steps[-1] == ("check(candidate)", "test")
    with pytest.raises(UnreadableTests, match="no assert statement"):
        read_suite(text, None)


@pytest.mark.parametrize(
    "text", ["", "x = 1", "assert f(", "[]", "[1, 2]", '["assert ("]', "(" * 10_000, "\x00", "null"]
)
def test_texts_without_a_test_are_refused(text):
    with pytest.raises(UnreadableTests):
        read_suite(text, "f")


@pytest.mark.parametrize(
    ("text", "cell", "fields", "status"),
    [
        ("no code", [{"input": "", "output": "1"}], {}, "no_answer"),
        (f"```python\n{'x' * (LONGEST_CODE + 1)}\n```", [{"input": "", "output": "1"}], {}, "too_long"),
        ("```python\npass\n```", None, {}, "gold_invalid"),
        ("no code", None, {}, "gold_invalid"),
        ("```python\npass\n```", [{"input": "", "output": "x" * 2000}], {"output_kib": 1}, "gold_invalid"),
        ("```python\npass\n```", "assert (", {"mode": "asserts"}, "gold_invalid"),
    ],
)
def test_what_needs_no_run_has_its_status(text, cell, fields, status):
    verdict = Code(**fields).score(Row(None, text, None, {"tests": cell}))
    assert verdict.status == status
    assert verdict.value is (None if status == "gold_invalid" else verdict.value)
    assert verdict.value in (None, 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "pytest"}, "mode is 'pytest'"),
        ({"require": "L3"}, "require is 'L3'"),
        ({"require": 1}, "require is 1"),
        ({"tests": ""}, "Give the name of a dataset column"),
        ({"entry_point": ""}, "Give the name of a dataset column"),
        ({"cpu_s": 0}, "at least 0.1"),
        ({"cpu_s": "2"}, "finite number"),
        ({"memory_mib": 10}, "at least 64"),
        ({"output_kib": 0}, "at least 1"),
        ({"partial": "yes"}, "true or false"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
    with pytest.raises(RuleError, match=message):
        Code(**fields)


def test_equal_code_and_tests_share_a_verdict():
    tests = [{"input": "", "output": "1"}]
    rows = [Row(None, f"{talk}\n```python\nx\n```", None, {"tests": tests}) for talk in ("Well", "So")]
    other = Row(None, "```python\ny\n```", None, {"tests": tests})
    keys = [Code().cache_key(row) for row in (*rows, other)]
    assert keys[0] == keys[1] != keys[2]
    assert len(set(keys)) == 2


@pytest.mark.parametrize("output", [b"", b"[1]", b"null", b"[1, 2]", b'["x", "", false]', b"\xff", b"{}"])
def test_a_report_that_is_none_passes_no_test(output):
    assert read_report(output)[0] == 0


def test_columns_are_the_tests_and_the_entry_point():
    assert Code().columns == ("tests",)
    assert Code(tests="test", entry_point="name", mode="asserts").columns == ("test", "name")
