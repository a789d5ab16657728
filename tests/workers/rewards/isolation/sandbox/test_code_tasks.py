"""Code: right programs pass, wrong ones do not, in both modes and at every level of the sandbox."""

import json
from pathlib import Path

import numpy
import pytest

from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.isolation.sandbox import api
from trl_ext.rewards.rules.code import Code

SITE = str(Path(numpy.__file__).parents[1])
SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "40 2\n", "output": "42\n"}]


def judged(code: str, tests: object, entry: str | None = None, **fields: object) -> Verdict:
    columns = {"tests": tests, "entry": entry}
    rule = Code(**({"cpu_s": 1.0} | fields), entry_point="entry" if entry else None)
    return rule.score(Row(None, f"Here it is:\n```python\n{code}\n```\n", None, columns))


def asserted(code: str, *tests: str, entry: str | None = None, **fields: object) -> Verdict:
    return judged(code, list(tests), entry, mode="asserts", **fields)


PROGRAMS = [
    ("a, b = map(int, input().split())\nprint(a + b)", SUM),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", SUM),
    ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", SUM),
    ("import sys\nsys.stdout.write(str(sum(map(int, input().split()))))\nsys.exit()", SUM),
    (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    return sum(map(int, input().split()))\n"
        "print(asyncio.run(main()))",
        SUM,
    ),
    *(("print(sum(map(int, open(0).read().split())))", SUM), ("print(sum(map(int, input().split())))\nexit()", SUM)),
    ("print(sum(map(int, input().split())))\nif True: quit(0)\nprint(5)", SUM),
    ("print('', 1 / 3)", [{"input": "", "output": "0.3333333333"}]),
    (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def main():\n    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
        SUM,
    ),
    ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", [{"input": "ab\ncd", "output": "ba\ndc"}]),
    ("n = int(input())\nfor i in range(n): print(i, end=' ')", [{"input": "3", "output": "0 1 2"}]),
    ("print(input().upper())", {"inputs": ["é", "straße"], "outputs": ["É", "STRASSE"]}),
    (
        "import heapq, collections, math, itertools, re\nprint(math.gcd(12, 18))",
        json.dumps([{"input": "", "output": "6"}]),
    ),
    (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(3))",
        [{"input": "", "output": "P(x=3)"}],
    ),
]


@pytest.mark.parametrize(("code", "tests"), PROGRAMS)
def test_a_right_program_passes(code, tests):
    verdict = judged(code, tests)
    assert (verdict.value, verdict.status) == (1.0, "ok"), verdict


def test_a_wrong_program_fails_and_the_detail_says_why(subtests):
    for code, reason in (
        *(("pass", "2 lines"), ("print(3)", "wrong output"), ("print(1/0)", "ZeroDivisionError")),
        *(("print(", "SyntaxError"), ("import numpy", "ModuleNotFoundError")),
        ("print(sum(map(int, input().split())))\nraise SystemExit(3)", "exit code 3"),
        ("print(sum(map(int, input().split())))\nimport os\nos.abort()", "exit code -6"),
        *(("print(3)\nprint(4)", "2 lines, expected 1"), ("x = \ud800", "SyntaxError"), ("x = '\x00'", "null bytes")),
    ):
        with subtests.test(code=code):
            verdict = judged(code, SUM if reason != "2 lines" else [{"input": "", "output": "1\n2"}])
            assert (verdict.value, verdict.status) == (0.0, "ok")
            assert reason in verdict.detail or code == "pass"


SUITES = [
    ("def f(x):\n    return x * 2", ["assert f(2) == 4", "assert f('ab') == 'abab'", "assert f([1]) == [1, 1]"]),
    ("def f(n):\n    return tuple(range(n))", ["assert f(3) == (0, 1, 2)", "assert f(3) != [0, 1, 2]"]),
    ("def f(w):\n    return {c: w.count(c) for c in w}", ["assert f('aab') == {'a': 2, 'b': 1}"]),
    ("from collections import Counter as f", ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('a')['z'] == 0"]),
    ("def f(x):\n    return {x, x + 1}", ["assert f(1) == {1, 2}", "assert 2 in f(1)"]),
    ("def f(x):\n    return x ** 0.5", ["import math", "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"]),
    ("def f(x):\n    yield from range(x)", ["assert list(f(3)) == [0, 1, 2]", "assert next(f(1)) == 0"]),
    ("def f(x):\n    return 10 ** 400 + x", ["assert f(1) == 10 ** 400 + 1"]),
    ("def f(x):\n    x.append(1)\n    x.sort()", ["values = [3, 2]", "f(values)", "assert values == [1, 2, 3]"]),
    ("def f(g, x):\n    return g(x) + 1", ["assert f(lambda x: x * 10, 2) == 21"]),
    (
        "def f(x):\n    raise ValueError('no')",
        ["try:\n    f(1)\nexcept ValueError as e:\n    r = str(e)", "assert r == 'no'"],
    ),
    (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(3)\nassert len(s) == 1\nassert s.items == [3]\nassert s.pop() == 3\nassert not s".split(
            "\n"
        ),
    ),
    ("import fractions\ndef f(x):\n    return fractions.Fraction(x, 3)", ["assert f(2) + f(1) == 1"]),
    ("def f(x):\n    return float('nan')", ["assert f(1) != f(1)"]),
    ("def f(x):\n    return None", ["assert f(1) is None"]),
    ("LIMIT = 5", ["assert LIMIT == 5"]),
    ("def f(x):\n    return x\nprint(f(3))\nexit()", ["assert f(3) == 3"]),
    ("def select(x):\n    return x", ["assert select(3) == 3"]),
    ("def f(x):\n    return x / 3", ["assert math.isclose(f(1), 0.3333333333333333)"]),
]


@pytest.mark.parametrize(("code", "tests"), SUITES)
def test_a_right_function_passes(code, tests):
    verdict = asserted(code, *tests)
    assert (verdict.value, verdict.status) == (1.0, "ok"), verdict


# Code, and asserts that hold in Python: values of many types, containers that the tests change, coroutines.
DAY = "datetime(2024, 1, 2, 3, tzinfo=timezone.utc)"
CLASS_V = "class V:\n  def __init__(s): s.d, s.l = {}, []\n  def n(s): return s.d\n  def add(s): s.l.append(s)"
QUEUE = "import asyncio\nq = asyncio.Queue()\nasync def f(x):\n  await q.put(x)\n  return await q.get()"
VALUES = [
    (f"from datetime import *\ndef f(): return {DAY}", f"from datetime import *\nassert f() == {DAY}"),
    ("from datetime import *\ndef f(): return date.max, time(1)", "from datetime import *\nassert f()[0] == date.max"),
    ("import datetime as t\ndef f(): return t.timedelta(-1, 5)", "import datetime\nassert f().seconds == 5"),
    ("from array import *\ndef f(): return array('d', [1])", "from array import *\nassert f() == array('d', [1])"),
    (
        "class S(str):\n  def loud(s): return s + '!'\ndef f(): return S('a')",
        "assert f() == 'a' and f().loud() == 'a!'",
    ),
    ("from enum import *\nclass E(IntEnum): A = 1\ndef f(): return E.A", "assert f() == 1 and {f(): 2}[1] == 2"),
    ("from enum import *\nclass E(StrEnum): A = 'a'\ndef f(): return E.A", "assert f() == 'a' and f().name == 'A'"),
    ("from enum import *\nclass E(IntEnum): A = 1\ndef f(e): return e is E.A", "assert f(E.A) and not f(1)"),
    ("def f(x): return {'a': x, 'b': int}", "assert f(str) == {'a': str, 'b': int}"),
    (CLASS_V, "v = V()\nv.d['a'] = 1\nassert v.n() == {'a': 1}"),
    (
        CLASS_V,
        "v = V()\nseen = v.l\nv.add()\nassert seen == [v]\nseen.append(1)\nassert len(v.l) == 2 and v.l is seen",
    ),
    (CLASS_V, "v = V()\nseen = v.l\nv.d['a'] = 1\nw = V()\nw.d['x'] = 'x' * 9999\nv.add()\nassert seen == [v]"),
    ("class V:\n  l = []\n  def __getitem__(s, i): return s.l", "v = V()\nv[1].append(1)\nassert V.l == [1] == v[2]"),
    ("class V:\n  def __repr__(s): return 'V!'", "assert repr(V()) == 'V!' and f'{V()!r}' == 'V!'"),
    ("class V(dict): pass", "v = V(a=1)\ndel v['a']\nassert len(v) == 0"),
    ("class V: pass", "assert isinstance(V(), V) and not isinstance(1, V)"),
    (QUEUE, "import asyncio\nassert asyncio.run(f(3)) == 3\nasync def test_f():\n  assert await f(4) == 4"),
    ("class V:\n  def __enter__(s): return 5\n  def __exit__(s, *a): return True", "with V() as x:\n  assert x == 5"),
]


@pytest.mark.parametrize(("code", "tests"), VALUES)
def test_what_holds_in_python_holds_between_two_processes(code, tests):
    verdict = asserted(code, tests)
    assert (verdict.value, verdict.status) == (1.0, "ok"), verdict


OWN = [
    (
        "class S(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\ndef f(): return S()",
        "assert f() == 'b'",
    ),
    ("class W(int):\n  def __lt__(s, o): return True\ndef f(): return W(3)", "assert f() < 2"),
    ("class V:\n  def __enter__(s): return 4\n  def __exit__(s, *a): return True", "with V() as x:\n  assert x == 5"),
    ("async def f(): return 3", "assert f() == 3"),
]


@pytest.mark.parametrize(("code", "tests"), OWN)
def test_an_own_comparison_or_exit_of_the_code_decides_nothing(code, tests):
    verdict = asserted(code, tests)
    assert (verdict.value, verdict.status) == (0.0, "ok"), verdict


# As the data sets write them: MBPP+ and others in a loop, BigCodeBench and ClassEval as TestCases, pytest as a class.
LOOP = """
def assertion(out, exp, atol):
    assert out == exp if atol == 0 else abs(out - exp) < atol
inputs, results = [[2], [3]], [4, 9]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(sq(*inp), exp, 0)
"""
UNITTEST = """
import unittest
class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.wanted = 4
    def setUp(self): self.given = 2
    def test_two(self): self.assertEqual(sq(self.given), self.wanted)
class TestCases(Base):
    def test_three(self):
        for given, wanted in ((3, 9), (-3, 9)):
            with self.subTest(given): self.assertAlmostEqual(sq(given), wanted)
    def test_text(self):
        with self.assertRaises(TypeError): sq("a")
if __name__ == "__main__":
    unittest.main()
"""
CLASS = """
class TestSq:
    def setup_method(self, method): self.given = 2
    def test_two(self): assert sq(self.given) == 4
    async def test_three(self): assert sq(3) == 9
"""
TRIES = "try:\n    sq('a')\n    assert False\nexcept TypeError:\n    pass\nwith open(0): assert sq(3) == 9"
MAIN = "if __name__ == '__main__':\n  assert sq(3) == 9"
FRAMES = {"loop": LOOP, "unittest": UNITTEST, "class": CLASS, "try": TRIES, "main": MAIN}


def test_asserts_count_in_loops_and_classes(subtests):
    for name, tests in FRAMES.items():
        for code, value in (("return x * x", 1.0), ("return 4", 0.0), ("raise AssertionError", 0.0)):
            with subtests.test(name, code=code):
                verdict = judged(f"def sq(x):\n    {code}", tests, mode="asserts")
                assert (verdict.value, verdict.status) == (value, "ok"), verdict


def test_what_fails_behind_the_last_assert_earns_nothing():
    tests = ["assert f(1) == 1", "f(2)"]
    assert asserted("def f(x):\n    return x", *tests).value == 1.0
    assert asserted("def f(x):\n    return 1 // (x - 2) + 2", *tests).value == 0.0


SOLUTION = "class Solution:\n    def top(self, nums: List[int], k: int) -> List[int]:\n        return {}"
FUNCTIONAL = [
    {"input": "[3, 1, 2]\n2", "output": "[1, 2]", "testtype": "functional"},
    {"input": "[]\n1", "output": "[]", "testtype": "functional"},
]
TACO = json.dumps({"fn_name": "half", "inputs": [[{"1": 3}], [{"1": 5}]], "outputs": [[1.5], [2.5]]})


def test_calls_give_the_expected_values(subtests):
    equal = "class E(float):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
    top = '{"func_name": "top"}'
    for code, tests, metadata, value in (
        (SOLUTION.format("nsmallest(k, nums)"), FUNCTIONAL, top, 1.0),
        (SOLUTION.format("tuple(sorted(nums)[:k])"), FUNCTIONAL, top, 1.0),
        (SOLUTION.format("sorted(nums)[:k]") + "\nexit()", FUNCTIONAL, json.loads(top), 1.0),
        *((SOLUTION.format(wrong), FUNCTIONAL, top, 0.0) for wrong in ("nums[:k]", "set(nums)")),
        ("def half(d):\n    print('at it')\n    return d[1] / 2", TACO, "{}", 1.0),
        ("def half(d):\n    return 1.5", TACO, "{}", 0.0),
        ("import os\nos.write(1, b'1.5\\n')\nos._exit(0)", TACO, "{}", 0.0),
        ("def half(d):\n    raise SystemExit", TACO, "{}", 0.0),
        (equal + "def half(d):\n    return E(0)", TACO, "{}", 0.0),
    ):
        with subtests.test(code=code, tests=tests):
            rule = Code(entry_point="metadata", cpu_s=1.0)
            verdict = rule.score(Row(None, f"```python\n{code}\n```", None, {"tests": tests, "metadata": metadata}))
            assert (verdict.value, verdict.status) == (value, "ok"), verdict


def test_a_helper_of_the_tests_is_not_the_candidates():
    columns = {
        "tests": "def check(candidate):\n    assert poly([2, 1], candidate([2, 1])) == 0\n",
        "name": "find_zero",
        "prompt_code": "def poly(xs, x):\n    return xs[0] + xs[1] * x\ndef find_zero(xs):\n    'the zero of poly'\n",
    }
    rule = Code(mode="asserts", entry_point="name", setup="prompt_code", cpu_s=1.0)
    right = "def find_zero(xs):\n    return -xs[0] / xs[1]"
    fake = "def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 7"
    values = [rule.score(Row(None, f"```python\n{code}\n```", None, columns)).value for code in (right, fake)]
    assert values == [1.0, 0.0]


def test_a_setup_that_fails_by_itself_has_no_value_and_one_that_a_candidate_can_break_earns_0(subtests):
    for setup, value, status in (
        *(("import numpy", None, "gold_invalid"), ("KNOWN = {}['x']", None, "gold_invalid")),
        *(("KNOWN = Node(1)", 0.0, "ok"), ("raise SystemExit", None, "gold_invalid")),
    ):
        with subtests.test(setup=setup, value=value):
            code = "def Node(x):\n    raise ValueError\ndef f(x):\n    return x"
            columns = {"tests": ["assert f(1) == 1"], "before": setup}
            rule = Code(mode="asserts", setup="before", cpu_s=1.0)
            verdict = rule.score(Row(None, f"```python\n{code}\n```", None, columns))
            assert (verdict.value, verdict.status) == (value, status), verdict


SUM_CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5 and len([candidate(1, 1)]) == 1\n"


def test_a_function_named_like_a_built_in_is_the_completions_where_it_is_under_test(subtests):
    right, wrong, none = "def sum(a, b):\n    return a + b", "def sum(a, b):\n    return 0", "pass"
    for tests, entry in (
        (["assert sum(2, 3) == 5", "assert sum(2, -2) == 0"], None),
        (["assert math.isclose(sum(2, 3), 5)"], None),
        ("from solution import sum\ndef test_sum():\n    assert len([sum(2, 3)]) == 1 and sum(2, 3) == 5\n", None),
        (["assert abs(sum(2, 3) - 5) < 1e-6"], "sum"),
        (SUM_CHECK, "sum"),
    ):
        for code, value in ((right, 1.0), (wrong, 0.0), (none, 0.0)):
            with subtests.test(tests=tests, code=code):
                verdict = judged(code, tests, entry, mode="asserts")
                assert (verdict.value, verdict.status) == (value, "ok"), verdict
    # Python's own would pass these: where the code has none, none is there.
    assert asserted("pass", "assert sum([2, 3]) == 5").value == 0.0
    assert asserted("pass", "assert sum([2, 3]) == 5", entry="sum").value == 0.0


def test_a_module_is_never_what_the_tests_import_from_the_completion():
    tests = "from solution import bisect\ndef test_bisect():\n    assert bisect.bisect([1], 1) == 1\n"
    for code in ("pass", f"__path__ = [{str(Path(json.__file__).parents[1])!r}]", "import sys\n__path__ = sys.path"):
        verdict = judged(code, tests, mode="asserts")
        assert (verdict.value, verdict.status) == (0.0, "ok"), verdict
    assert judged("import bisect", tests, mode="asserts").value == 1.0


@pytest.mark.parametrize(
    "fake",
    [
        *("def len(x): return 3", "def abs(x): return 0", "def isinstance(x, kind): return True"),
        *(
            "def all(x): return True",
            "def print(*x): raise SystemExit",
            "__all__ = ['len', 'sorted']\nlen = sorted = 1",
        ),
        "def sorted(x): return x",
    ],
)
def test_a_built_in_of_the_tests_is_never_the_completions(fake):
    code = f"{fake}\ndef f(x):\n    return [x, 0]"
    tests = [
        *("print(f(1))", "assert len(f(1)) == 2 and abs(f(-3)[0]) == 3", "assert not isinstance(f(1), str)"),
        *("assert not all(f(1))", "assert sorted(f(1)) == [0, 1]"),
    ]
    assert asserted(code, *tests).value == 1.0
    assert asserted(code, *tests, entry="f").value == 1.0
    assert asserted(code, "from solution import *", *tests).value == 1.0
    assert asserted(f"{fake}\ndef f(x):\n    return [7, 7, 7]", *tests).value == 0.0


PYTEST = """
import pytest
from solution import Node, join as joined

def last(node):
    while node.next:
        node = node.next
    return node.value

def test_join():
    first, second = Node(1), Node(2)
    joined(first, second)
    assert last(first) == 2

def test_a_cycle():
    one = Node(1)
    one.next = one
    with pytest.raises(ValueError, match="cycle") as caught:
        joined(one, Node(2))
    assert "cycle" in str(caught.value)

def test_half():
    assert Node(1).half() == pytest.approx(0.5000000001) and [0.5] == pytest.approx([0.5])

if __name__ == "__main__":
    pytest.main()
"""
NODE = """
class Node:
    def __init__(self, value):
        self.value, self.next = value, None
    def half(self):
        return self.value / 2
def last(node):
    return 2
def join(one, two):
    if one.next is one:
        raise ValueError("a cycle")
    one.next = two
"""


def test_functions_of_pytest_are_tests(subtests):
    for code, passed in (
        *((NODE, 3), (NODE.replace("one.next = two", "pass"), 2), (NODE.replace("ValueError", "KeyError"), 2)),
        *((NODE.replace("a cycle", "no"), 2), (NODE.replace("/ 2", "/ 3"), 2), (NODE.replace("def join", "def j"), 0)),
        *((NODE.replace("raise ValueError", "print"), 2), ("", 0)),
    ):
        with subtests.test(code=code):
            verdict = judged(code, PYTEST, mode="asserts", partial=True)
            assert verdict.status == "ok" and verdict.value == pytest.approx(passed / 3), verdict


def test_tests_may_be_a_function_check_or_one_text_with_helpers():
    tests = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-2) == 4\n"
    for code, value in (("square(x): return x * x", 1.0), ("square(x): return x + x", 0.0), ("g(x): return 4", 0.0)):
        assert judged(f"def {code}", tests, "square", mode="asserts").value == value
    known = "from math import prod\ndef known(n):\n    return prod(range(1, n + 1))\n"
    tests = known + "assert f(5) == known(5)\nassert f(0) == 1"
    assert judged("def f(n):\n    return n * f(n - 1) if n else 1", tests, mode="asserts").value == 1.0


def test_what_the_tests_import_is_there_and_is_not_of_the_candidates_making():
    verdict = asserted("def f(x):\n    return x", "import numpy as np", "assert f(2) == np.array(2)")
    assert (verdict.value, verdict.status) == (None, "gold_invalid")
    assert "numpy" in verdict.detail
    fake = "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x):\n    return 0"
    assert asserted(fake, "assert math.isclose(f(1), 0.5)").value == 0.0


NUMPY = [
    ("def f(x):\n    return np.array(x) * 2", "import numpy as np", "assert np.allclose(f([1, 2]), [2, 4])", 1.0),
    ("def f(x):\n    return np.mean(x)", "import numpy as np", "assert f([1, 2]) == 1.5", 1.0),
    ("def f(x):\n    return np.eye(2)", "import numpy as np", "assert f(0).shape == (2, 2) and f(0)[1, 1] == 1", 1.0),
    ("def f(x):\n    return np.array([1j])", "import numpy as np", "assert (f(0) == np.array([1j])).all()", 1.0),
    ("def f(x):\n    return np.sum(x)", "", "assert f(np.arange(4)) == 6", 1.0),
    ("def f(x):\n    return np.zeros(2)", "import numpy as np", "assert np.allclose(f([1, 2]), [2, 4])", 0.0),
    (
        "class A(np.ndarray):\n    def __eq__(s, o): return np.True_\n    def all(s): return True\n"
        "def f(x):\n    return np.zeros(2).view(A)",
        "import numpy as np",
        "assert (f(1) == np.array([2, 4])).all()",
        0.0,
    ),
    (
        "np.allclose = lambda *a: True\ndef f(x):\n    return 5",
        "import numpy as np",
        "assert np.allclose(f(1), 1)",
        0.0,
    ),
]


@pytest.mark.parametrize(("code", "setup", "test", "value"), NUMPY)
def test_numpy_is_there_on_both_sides_where_it_is_asked_for(code, setup, test, value):
    columns = {"tests": [test], "setup": setup or "import numpy as np"}
    row = Row(None, f"```python\nimport numpy as np\n{code}\n```", None, columns)
    rule = Code(mode="asserts", setup="setup", cpu_s=1.0, numpy=True)
    assert (rule.score(row).value, rule.score(row).status) == (value, "ok"), rule.score(row)


def test_programs_and_calls_use_numpy_and_its_chance_is_the_same_in_every_run():
    total = "import numpy as np\nprint(np.array(input().split(), int).sum())"
    assert judged(total, [{"input": "1 2", "output": "3"}], numpy=True).value == 1.0
    call = {"fn_name": "f", "inputs": [[[3, 1]]], "outputs": [[1, 3]]}
    assert judged("import numpy as np\ndef f(x):\n    return np.sort(x)", call, numpy=True).value == 1.0
    assert judged("def f(x):\n    return {1, 3}", call, numpy=True).value == 0.0
    drawn = b"import numpy\nprint(numpy.random.rand(), numpy.random.randint(100))"
    limits = api.JobLimits(1.0, 512, 1024, SITE)
    assert api.run_program(drawn, b"", limits).output == api.run_program(drawn, b"", limits).output != b""


def test_partial_gives_the_share_of_tests_passed_and_a_time_limit_ends_the_row():
    assert judged("print(3)", SUM, partial=True).value == 0.5
    assert asserted("def f(x):\n    return 4", "assert f(2) == 4", "assert f(3) == 9", partial=True).value == 0.5
    assert asserted("def f(x):\n    return 4", "assert f(3) == 9", "assert f(2) == 4").value == 0.0
    verdict = judged("while True: pass", [{"input": "", "output": "1"}] * 20, partial=True, cpu_s=0.3)
    assert (verdict.value, verdict.status) == (0.0, "timeout")


@pytest.mark.parametrize("code", ["import random\nprint(random.random())", "print({'a', 'b', 'c', 'd', 'e'})"])
def test_chance_and_the_order_of_sets_are_the_same_in_every_run(code):
    first, second = (judged(code, [{"input": "", "output": "x"}]) for _ in range(2))
    assert first == second


def test_rows_are_scored_several_at_a_time():
    good, bad = "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(0)\n```"
    rows = [Row(None, text, None, {"tests": SUM}) for text in (good, bad, good, "none", good)]
    assert [verdict.value for verdict in Code().score_batch(rows)] == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_random_text_as_code_earns_nothing_and_raises_nothing():
    hypothesis = pytest.importorskip("hypothesis")
    parts = ["```python\n", "\n```\n", "</think>", "print(3)", "\x00", "\ud800", "import os\n", "f(1)", "é\r\n"]
    pieces = hypothesis.strategies.lists(
        hypothesis.strategies.one_of(
            hypothesis.strategies.sampled_from(parts), hypothesis.strategies.text(max_size=20)
        )
    )
    rule = Code(cpu_s=0.3)

    @hypothesis.settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @hypothesis.given(pieces)
    def score(texts: list[str]) -> None:
        text = "```python\n" + "".join(texts) + "\n```"
        assert rule.score(Row(None, text, None, {"tests": [{"input": "", "output": "17"}]})).value == 0.0

    score()
