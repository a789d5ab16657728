"""Code without running any: what is extracted, how tests are read, what its fields refuse."""

import base64
import json
import pickle
import random
import sys
import tracemalloc
import zlib

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.isolation.sandbox import api
from trl_ext.rewards.isolation.sandbox.cases import (
    Case,
    UnreadableTests,
    cell_text,
    function_name,
    read_cases,
)
from trl_ext.rewards.isolation.sandbox.outputs import lines_of, wrong_result, wrong_text, wrong_tokens
from trl_ext.rewards.isolation.sandbox.suite import read_suite
from trl_ext.rewards.rules.code import LONGEST_CODE, Code, read_report
from trl_ext.rewards.text.fences import python_answer
from trl_ext.rewards.text.prose import after_think


@pytest.fixture(autouse=True)
def any_level(monkeypatch):
    monkeypatch.setattr(api, "sandbox_level", lambda **_: (2, ""))


def test_the_last_closed_python_block_behind_the_thinking_is_the_code(subtests):
    for text, code in (
        *(("```python\nx = 1\n```", "x = 1"), ("a\n```python\nx = 1\n```\nb\n```python\nx = 2\n```\nc", "x = 2")),
        *(("```Python\nx = 1\n```", "x = 1"), ("``` py\nx = 1\n  ```", "x = 1")),
        ("  ```python3\n  x = 1\n```", "x = 1"),
        ("1. So:\n\n    ```python\n    if x:\n        y = 1\n    ```", "if x:\n    y = 1"),
        *(("- ```python\n  x = 1\n  ```", "x = 1"), ("2) ```python\n   x = 1\n\n   y = 2\n   ```", "x = 1\n\ny = 2")),
        ("   ```python\nx = (\n  1)\n   ```", "x = (\n  1)"),
        ("```python\ndef f(x):\n    return x\n```\nUse:\n```python\nprint(f(3))\n```", "def f(x):\n    return x"),
        ("```python\ndef f(x):\n    return x\n```\n```python\n>>> f(3)\n3\n```", "def f(x):\n    return x"),
        ("```python\nclass A: pass\n```\n```python\nassert A() == A()\n```\n```python\nA()\n```", "class A: pass"),
        ("```python\ndef f(): 0\n```\nBetter:\n```python\ndef f(): 1\nf()\n```", "def f(): 1\nf()"),
        ("```python\ndef gcd(): 0\n```\n```python\nfrom math import gcd\ngcd(4)\n```", "from math import gcd\ngcd(4)"),
        ("```python\ndef count(s): ...\n```\n```python\nprint(input().count('a'))\n```", "print(input().count('a'))"),
        *(("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"), ("```text\n```python\n```\n", None)),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        ("```python\nx = 1\n```\nand then\n```python\nx = 2", "x = 1"),
        ("<think>\n```python\nx = 0\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
        *(("<think>\n```python\nx = 0\n```\n</think>\nno code", None), ("<think>\n```python\nx = 0\n```", None)),
        *(("```python\n```", ""), ("```\nx = 1\n```", "x = 1")),
        ("```\nprint(input())\n```\nIt prints:\n```\n3\n```", "print(input())"),
        *(("```python\nx = 1\n```\n```\ny = 1\n```", "x = 1"), ("x ```python\nx = 1\n```", None)),
        *(("```python x = 1```", None), ("", None), ("`" * 100_000, None), ("```\n" * 100_001, "")),
        *(("~~~python\nx = 1\n~~~", "x = 1"), ("~~~~py\nx = '''\n```\n~~~\n'''\n~~~~~", "x = '''\n```\n~~~\n'''")),
        *(("```python\nx = 1\n~~~\n```", "x = 1\n~~~"), ("~~~~\nSo:\n```python\nx = 1\n```", "x = 1")),
    ):
        with subtests.test(text=text):
            assert python_answer(after_think(text)) == code


def test_a_last_block_that_nothing_closes_counts_where_it_is_asked_for(subtests):
    for text, code, cut in (
        *(("```python\nx = 1\ny =", None, "x = 1\ny ="), ("1. ```python\n   x = 1\n   y = 2", None, "x = 1\ny = 2")),
        *(("```python\nx = 1\n```\nor\n```python\nx = 2", "x = 1", "x = 2"), ("~~~python\nx = 1", None, "x = 1")),
        ("```python\ndef f(): 1\n```\n```python\nf()", "def f(): 1", "def f(): 1"),
        *(("```python\nx = 1\n```\n```bash\nls", "x = 1", "x = 1"), ("<think>\n```python\nx = 1", None, None)),
        *(("```python", None, ""), ("no code", None, None), ("```\n" * 100_001, "", "")),
    ):
        with subtests.test(text=text):
            assert python_answer(after_think(text)) == code
            assert python_answer(after_think(text), unclosed=True) == cut


@pytest.mark.slow
def test_a_megabyte_of_fences_is_read_in_one_pass():
    assert python_answer("```python\nx\n```\n" * 60_000) == "x"
    assert python_answer("```python\ndef f(): 0\n```\n" + "```python\nf()\n```\n" * 60_000) == "def f(): 0"


def test_every_shape_of_cases_is_read(subtests):
    for cell in (
        [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}],
        {"inputs": ["1", "3"], "outputs": ["2", "4\n"]},
        {"inputs": [["1"], ["3"]], "outputs": [["2", ""], "4"], "fn_name": None},
        '[{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]',
        '{"inputs": ["1", "3"], "outputs": ["2", "4"]}',
    ):
        with subtests.test(cell=cell):
            found = read_cases(cell_text(cell))
            assert [(case.stdin, case.expected.strip()) for case in found.cases] == [("1", "2"), ("3", "4")]
            assert found.function is None


CALLS = [
    ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[3]]}, None, Case('[1, "a"]', ([3], 3))),
    ({"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[3, 4]]}, None, Case("[[1, 2]]", ([3, 4],))),
    ([{"input": "[1]\n2", "output": "3", "testtype": "functional"}], "f", Case("[[1], 2]", (3,))),
    (
        [{"input": "1", "output": "null", "testtype": "functional", "metadata": {"func_name": "f"}}],
        None,
        Case("[1]", (None,)),
    ),
    ([{"fn_name": "f", "input": [1], "output": 2, "type": "function_call"}], None, Case("[1]", (2,))),
]


@pytest.mark.parametrize(("cell", "entry_point", "case"), CALLS)
def test_calls_are_read_in_the_shapes_of_their_datasets(cell, entry_point, case):
    found = read_cases(cell_text(cell), entry_point)
    assert (found.function, found.cases) == ("f", (case,))


def packed(text: object, protocol: int = 4) -> str:
    """A cell of LiveCodeBench's private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()


def test_the_shapes_of_other_datasets_are_read(subtests):
    cases = (Case("1 2\n", "3\n"), Case("4", "5"))
    listed = [{"type": "stdin_stdout", "input": case.stdin, "output": case.expected} for case in cases]
    for cell in (
        {"input": ["1 2\n", "4"], "output": ["3\n", "5"]},  # CodeContests
        {"language": "python", "test_cases": [{**case, "fn_name": None} for case in listed]},  # SYNTHETIC-1
        json.dumps({"language": "python", "test_cases": json.dumps(listed)}),
        *(packed(json.dumps(listed), protocol) for protocol in range(6)),  # LiveCodeBench
    ):
        with subtests.test(cell=cell):
            assert read_cases(cell_text(cell)).cases == cases
    long = [{"input": "é" * 10**6, "output": "1", "testtype": "stdin"}]
    assert read_cases(packed(json.dumps(long, ensure_ascii=False))).cases == (Case("é" * 10**6, "1"),)
    calls = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}]}
    assert read_cases(cell_text(calls)).cases == (Case("[1]", (2,)),)


class Deed:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import sys; sys.modules['deed'] = 1",)


def test_a_pickle_that_is_more_than_one_text_is_not_opened(subtests):
    good = pickle.dumps('[{"input": "1", "output": "2"}]')
    raw = {
        "something else than one text": (
            *(pickle.dumps(thing) for thing in (Deed(), ["[]"], b"[]", 3, None, Deed)),
            *(good[:-1] + good[2:], good[:-1] + b"0" + good[2:], good[:-1] + b"cos\nsystem\n."),
        ),
        "not opened": (good[:-1], good[:9], b"", b"\x8d" + b"\xff" * 8, b"\x8b\xff\xff\xff\xff", b"V\\ud800\\u1\n."),
    }
    for reason, datas in raw.items():
        for data in datas:
            with subtests.test(data=data), pytest.raises(UnreadableTests, match=reason):
                read_cases(base64.b64encode(zlib.compress(data)).decode())
    for text in ("eJw", "eJwé", packed("[]")[:-8], base64.b64encode(b"x\x9cnothing").decode()):
        with subtests.test(text=text), pytest.raises(UnreadableTests, match="packed tests are not opened"):
            read_cases(text)
    with pytest.raises(UnreadableTests, match="is not a list of"):
        read_cases(packed("no JSON"))
    assert "deed" not in sys.modules


def test_random_instructions_of_pickles_are_refused_and_do_nothing():
    source, good = random.Random(0), pickle.dumps("[" * 300)
    for _ in range(3000):
        data = bytearray(good[: source.randrange(len(good))] if source.random() < 0.5 else source.randbytes(40))
        for _ in range(source.randrange(4)):
            data.insert(source.randrange(len(data) + 1), source.randrange(256))
        with pytest.raises(UnreadableTests):
            read_cases(base64.b64encode(zlib.compress(bytes(data), 1)).decode())


@pytest.mark.slow
def test_a_zip_bomb_unpacks_to_no_more_than_the_limit():
    squeeze = zlib.compressobj(1)
    bomb = b"".join([*(squeeze.compress(bytes(10**7)) for _ in range(40)), squeeze.flush()])
    tracemalloc.start()
    with pytest.raises(UnreadableTests, match="cut off, or more than 100 MB"):
        read_cases(base64.b64encode(bomb).decode())
    assert tracemalloc.get_traced_memory()[1] < 250 * 10**6  # Of 400.
    tracemalloc.stop()


def test_tests_that_say_what_nobody_reads_are_refused(subtests):
    for cell, reason in (
        ({"inputs": ["1"], "outputs": ["2"], "checker": "x"}, "the key 'checker'"),
        ({"language": "cpp", "test_cases": []}, "the key 'language'"),
        ([{"input": "1", "output": "2", "timeout": 3}], "the key 'timeout'"),
        ([{"input": "1", "output": "2", "testtype": "interactive"}], "type 'interactive'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "None is no function's name"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "'a b' is no function's name"),
        ({"fn_name": "f", "inputs": ["one"], "outputs": ["1"]}, "no JSON"),
        ({"fn_name": "f", "inputs": [3], "outputs": [1]}, "neither a list nor lines"),
        ([{"input": "1", "output": "2", "fn_name": "f"}, {"input": "1", "output": "2"}], "several types"),
    ):
        with subtests.test(cell=cell), pytest.raises(UnreadableTests, match=reason):
            read_cases(cell_text(cell))


def test_a_functions_name_stands_alone_or_in_json(subtests):
    for name, cells in {"f": ("f", '{"func_name": "f"}', {"fn_name": "f"}), None: ("{}", "", None, "{")}.items():
        for cell in cells:
            with subtests.test(cell=cell):
                assert function_name(cell) == name


def test_cells_that_are_no_cases_are_refused(subtests):
    for cell in (
        *(None, "", [], {}, 5, float("nan"), "no JSON", "[" * 100_000, [{"input": "1"}], [{"input": 1, "output": 2}]),
        *({"inputs": ["1"], "outputs": []}, {"inputs": "1", "outputs": "2"}, ["assert f(1)"], [None], {1: 2, (3,): 4}),
    ):
        with subtests.test(cell=cell), pytest.raises(UnreadableTests, match="is not a list of"):
            read_cases(cell_text(cell))


def test_only_trailing_white_space_of_an_output_is_ignored(subtests):
    for output, lines in (
        *(("1\n2\n", ("1", "2")), ("1 \n2\t\r\n\n\n", ("1", "2")), ("\n1", ("", "1")), ("1\n\n2", ("1", "", "2"))),
        *((" 1", (" 1",)), ("", ("",))),
    ):
        with subtests.test(output=output):
            assert lines_of(output) == list(lines)


@pytest.mark.parametrize("output", ["1\n2", "1\n2\n3\n4", "1\n3\n2", "1 2 3", "", "0\n1\n2\n3", "1\n2\n3\n."])
def test_only_the_whole_output_is_right(output):
    for wrong in (wrong_text(output, "1\n2\n3"), wrong_tokens(output, "1\n2\n3", 1e-6)):
        assert wrong
    for right in ("1\n2 \n3\n", "1\n2\n3\n\n"):
        assert not wrong_text(right, "1\n2\n3") and not wrong_tokens(right, "1\n2\n3", 1e-6)


def test_tokens_are_equal_as_text_or_as_numbers(subtests):
    for output, expected in (
        *(("1  2", "1 2"), ("\n 1 2\t\n", "1 2"), ("0.33333333", "0.333333333333"), ("1e3", "1000.0")),
        *(("1000000000.5", "1000000000.0"), ("3.0", "3"), ("+3", "3"), ("Case 1: 0.5000", "Case 1: 0.5")),
        *(("1e999", "1e999"), ("NO", "NO")),
    ):
        with subtests.test(output=output):
            assert wrong_tokens(output, expected, 1e-6) == ""


def test_tokens_that_are_neither_differ(subtests):
    for output, expected in (
        *(("12", "1 2"), ("1\n2", "1 2"), ("0.3333", "0.333333333333"), ("3.0000001", "3"), ("2.9999999", "3")),
        *(("nan", "0.5"), ("inf", "1e308"), ("1e999", "0.5"), ("1_0", "10"), ("\u0663", "3")),
        *(("9" * 5000 + ".0", "9" * 5000), ("no", "NO"), ("1/2", "0.5")),
    ):
        with subtests.test(output=output):
            wrong = wrong_tokens(output, expected, 1e-6)
            assert wrong == "wrong output" or "lines" in wrong


def test_a_result_is_the_json_on_the_last_line(subtests):
    for output, accepted, right in (
        *(("debug\n[1, 2]", ([1, 2],), True), ("[3]", ([3], 3), True), ("3", ([3], 3), True)),
        *(('{"1": [0.30000000000000004]}', ({"1": [0.3]},), True), ("3.0", (3,), True), ("3.0000001", (3,), False)),
        *(("true", ("true",), False), ("[1, 2]\ndone", ([1, 2],), False), ("NaN", (0.5,), False)),
        *(("", (None,), False), ("[" * 100_000, ([],), False), ("9" * 5000, (9,), False)),
    ):
        with subtests.test(output=output, accepted=accepted):
            assert (wrong_result(output, accepted, 1e-6) == "") is right


COUNTED = {
    "import math\nfor i in range(3):\n    assert f(i)\nassert f(3)\nassert f(4)\n": 3,
    "def same(a, b):\n    if a != b: raise AssertionError\ndef twice(a): same(f(a), a)\ntwice(1)\nprint(f(1))": 1,
    "import numpy as np\nnp.testing.assert_allclose(f(1), 1)\nwith raises(ValueError): f(0)": 2,
    "class TestX:\n    def test_a(self): assert f(1)\n    async def test_b(self): assert f(2)\n    def c(self): 1": 2,
    "class A(unittest.TestCase):\n    def test_a(self): 1\nclass B(A):\n    def test_b(self): 2": 3,
    "def test_a(): assert f(1)\nif __name__ == '__main__':\n    test_a()": 1,
    "def main(): assert f(1)\nif __name__ == '__main__':\n    x = 1\n    main()": 1,
}


def test_a_suite_counts_what_asserts_at_its_outermost_level(subtests):
    for text, num_tests in COUNTED.items():
        with subtests.test(text):
            assert read_suite(text, None).num_tests == num_tests
    assert read_suite(json.dumps(["x = 1", "assert f(x)"]), None).steps == (
        ("x = 1", "prepare"),
        ("assert f(x)", "test"),
    )


def test_a_check_function_counts_where_an_entry_point_is_known():
    text = "def check(candidate):\n    assert candidate(1)\n"
    assert read_suite(text, "f").steps[-1] == ("check(candidate)", "test")
    with pytest.raises(UnreadableTests, match="no assert statement"):
        read_suite(text, None)


POLY = "def check(candidate):\n    assert poly(candidate([1])) == 0\n"
SETUP = "import math\ndef poly(x):\n    return math.floor(x)\ndef f(x):\n    'doc'\n"


def test_what_the_tests_use_comes_from_the_setup_and_never_from_the_candidate():
    suite = read_suite(POLY, "f", SETUP)
    kinds = [kind for _, kind in suite.steps]
    assert kinds == ["setup", "setup", "prepare", "test"] and "def f" not in repr(suite.steps)
    with pytest.raises(UnreadableTests, match="the tests use poly, which they do not define"):
        read_suite(POLY, "f")
    with pytest.raises(UnreadableTests, match="the setup does not parse"):
        read_suite(POLY, "f", "def")


def test_the_function_under_test_is_the_one_built_in_that_the_completion_replaces(subtests):
    for text, entry, names in (
        *(("assert sum(2, 3) == 5", None, {"sum": "sum"}), ("assert set(f(1)) == {1}", None, {"f": "f"})),
        *(
            ("assert abs(sum(2, 3) - 5) < 1", "sum", {"candidate": "sum", "sum": "sum"}),
            ("x = 1\nassert x", None, {"x": "x"}),
        ),
        *(
            ("from solution import sum\nassert abs(sum(2, 3))", None, {}),
            ("from os import *\nassert set(x)", None, {"x": "x"}),
        ),
        ("from solution import *\nassert len(f(1))", None, {"f": "f"}),
    ):
        with subtests.test(text=text):
            assert read_suite(text, entry).names == names


def test_tests_that_leave_open_what_they_test_or_use_more_of_pytest_are_refused(subtests):
    for text, reason in (
        ("assert abs(sum(2, 3) - 5) < 1e-6", "only built-ins \\(abs, sum\\); name the one under test as entry_point"),
        ("import pytest\n@pytest.mark.skip\ndef test_f():\n    assert f(1)", "more of pytest than approx and raises"),
        ("from solution import f\ndef test_f():\n    assert g(1)", "the tests use g, which they do not define"),
        ("from solution import f\ndef test_f(tmp_path):\n    assert f(tmp_path)", "test_f takes arguments"),
    ):
        with subtests.test(text=text), pytest.raises(UnreadableTests, match=reason):
            read_suite(text, None)


def test_names_that_the_tests_bind_themselves_need_no_setup(subtests):
    for text in (
        "from os import *\nassert f(getcwd()) and f([c for c in 'ab'])",
        "with open('x') as g, g:\n    pass\ntry:\n    f(1)\nexcept ValueError as e:\n    e\nassert math.pi",
        "class A:\n    x = 1\ny: int = 2\nassert (z := f(A.x)) and z and y and (lambda q, *r, **s: q and r and s)(1)",
    ):
        with subtests.test(text=text):
            assert read_suite(text, "f").num_tests == 1


def test_texts_without_a_test_are_refused(subtests):
    for text in ("", "x = 1", "assert f(", "[]", "[1, 2]", '["assert ("]', "(" * 10_000, "\x00", "null"):
        with subtests.test(text=text), pytest.raises(UnreadableTests):
            read_suite(text, "f")


def test_what_needs_no_run_has_its_status(subtests):
    for text, cell, fields, status in (
        ("no code", [{"input": "", "output": "1"}], {}, "no_answer"),
        (f"```python\n{'x' * (LONGEST_CODE + 1)}\n```", [{"input": "", "output": "1"}], {}, "too_long"),
        *(("```python\npass\n```", None, {}, "gold_invalid"), ("no code", None, {}, "gold_invalid")),
        ("```python\npass\n```", [{"input": "", "output": "x" * 2000}], {"output_kib": 1}, "gold_invalid"),
        ("```python\npass\n```", "assert (", {"mode": "asserts"}, "gold_invalid"),
    ):
        with subtests.test(text=text, cell=cell):
            verdict = Code(**fields).score(Row(None, text, None, {"tests": cell}))
            assert verdict.status == status
            assert verdict.value is (None if status == "gold_invalid" else verdict.value)
            assert verdict.value in (None, 0.0)


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


def test_numpy_has_to_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuleError, match="numpy is true, and NumPy is not installed"):
        Code(numpy=True)


def test_columns_are_the_tests_and_the_entry_point():
    assert Code().columns == ("tests",)
    assert Code(tests="test", entry_point="name", mode="asserts").columns == ("test", "name")
    assert Code(setup="before", mode="asserts").columns == ("tests", "before")
