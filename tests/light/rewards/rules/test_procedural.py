"""Procedural: reasoning-gym's scorers, behind a guard that keeps answers from being run as code."""

import json
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.rewards.rule import Row, Verdict
from trl_ext.rewards.rules.procedural import Procedural, find_answer, scorer
from trl_ext.rewards.rules.procedural_guard import (
    _PARSERS,
    ANSWERS,
    FAULTY,
    _names_behind,
    is_formula,
    is_literal,
    runs_code,
)

# The import alone takes seconds, so it is not made where tests are collected, and none of them is for `make light`.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")]


def tasks_of(family):
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=3, size=4)


FAMILIES = (
    "chain_sum",
    "basic_arithmetic",
    "countdown",
    "n_queens",
    "spiral_matrix",
    "simple_integration",
    "rotate_matrix",
)


@lru_cache
def entry_of(family: str, index: int = 0) -> str:
    return json.dumps(tasks_of(family)[index], default=str)


def judged(text: str, entry: object, **fields: object) -> Verdict:
    return Procedural(**fields).score(Row(None, text, None, {"entry": entry}))


SUM = json.dumps({"question": "4 + 3 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrap", ["<think>1</think><answer> {} </answer> Bye.", "So it is\n{}\n"])
def test_the_entrys_own_answer_earns_one(family, wrap):
    entry = entry_of(family)
    answer = json.loads(entry)["answer"]
    assert judged(wrap.format(answer), entry).value == 1.0
    assert judged(wrap.format(answer), json.loads(entry)).value == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_answer_earns_less_than_one(family):
    assert judged("<answer>0</answer>", entry_of(family)).value < 0.1


def test_the_last_tag_or_the_last_lines_are_the_answer(subtests):
    for text, gold, answer in (
        *(("a\nb\nc", "x", "c"), ("a\nb\nc\n\n", "1 2\n3 4", "b\nc")),
        *(("<answer>1</answer> or <answer>2</answer>", "x", "2"), ("<answer>1\n2", "x", "1\n2")),
        *(("<think><answer>1</answer></think>2", "x", "2"), ("<think>2", "x", ""), ("#### 3", None, "#### 3")),
    ):
        with subtests.test(text=text, gold=gold):
            assert find_answer(text, gold) == answer


@pytest.mark.parametrize("text", ["", " \n", "<answer></answer>", "<think>7"])
def test_no_answer_earns_the_floor(text):
    assert judged(text, SUM) == Verdict(0.0, "no_answer", "no answer")


def test_partial_scores_can_be_shut_off():
    assert judged("17", SUM).value == 0.5  # The library pays for an answer that contains the right one.
    assert judged("17", SUM, partial=False).value == 0.0
    assert judged("7", SUM, partial=False).value == 1.0


def test_a_family_and_its_configuration_can_be_given():
    entry = {"question": "1 / 3 = ?", "answer": "0.333", "metadata": {}}
    configs = {"decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}}
    assert judged("0.3", entry, dataset="decimal_arithmetic", configs=configs).value == 1.0
    assert judged("0.3", entry, dataset="decimal_arithmetic").value == 0.0


def test_a_bad_entry_has_no_value(subtests):
    for entry in (
        *(None, 7, "", "[]", "[" * 10_000, "{}", '{"answer": "7", "metadata": {}}'),
        '{"answer": "7", "metadata": {"source_dataset": "no_such_family"}}',
        '{"answer": 7, "metadata": {"source_dataset": "chain_sum"}}',
        '{"answer": "0", "metadata": {"source_dataset": "countdown"}}',  # no numbers, no target
        *(json.dumps({"answer": "1", "metadata": {"source_dataset": family}}) for family in FAULTY),
    ):
        with subtests.test(entry=entry):
            verdict = judged("7", entry)
            assert (verdict.value, verdict.status) == (None, "gold_invalid")


@pytest.mark.parametrize("family", sorted(FAULTY))
def test_the_faulty_scorers_still_pay_for_one_answer_to_all_tasks(family):
    answer = {"coin_flip": "0", "game_of_life_halting": "x", "puzzle24": "6*4+1-1"}[family]
    tasks = tasks_of(family)
    assert sum(tasks.score_answer(answer, tasks[index]) == 1.0 for index in range(4)) >= 3


@pytest.mark.parametrize("family", [*ANSWERS, "number_sorting", "bitwise_arithmetic", "chain_sum"])
def test_no_answer_runs_as_code(family, tmp_path):
    trace = tmp_path / "ran"
    code = f"open({str(trace)!r}, 'w').close()"
    for answer in (code, f"[{code}]", f"({code}, 1)", f"1 if {code} else 2", f"[{code} for _ in [1]]"):
        assert judged(f"<answer>{answer}</answer>", entry_of(family)).value <= 0.05
    assert not trace.exists()


@pytest.mark.parametrize(
    ("family", "place"),
    [("number_sorting", "answer"), ("bitwise_arithmetic", "problem"), ("simple_integration", "integrand")],
)
def test_no_entry_runs_as_code(family, place, tmp_path):
    trace = tmp_path / "ran"
    entry = json.loads(entry_of(family))
    target = entry if place == "answer" else entry["metadata"]
    target[place] = f"open({str(trace)!r}, 'w')"
    assert judged("<answer>[1]</answer>", entry).status == "gold_invalid"
    assert not trace.exists()


def test_every_scorer_that_evaluates_is_guarded():
    from reasoning_gym.factory import DATASETS

    evaluating = {name for name, (kind, _) in DATASETS.items() if _names_behind(kind, "score_answer") & _PARSERS}
    known = {*ANSWERS, *FAULTY, "number_sorting", "bitwise_arithmetic"}
    assert evaluating >= {"binary_matrix", "countdown", "n_queens", "puzzle24", "spiral_matrix", "string_insertion"}
    assert evaluating <= known


class Evaluating:
    def read(self, answer):
        return eval(answer)

    def score_answer(self, answer, entry):
        return float(self.read(answer))


def test_a_scorer_that_evaluates_through_a_helper_is_refused():
    assert runs_code("my_family", Evaluating().score_answer)
    assert not runs_code("chain_sum", scorer("chain_sum", "{}"))


def test_formulas_are_small_and_call_only_known_functions(subtests):
    for allowed, texts in {
        True: ("2*(2 - 8*x)**(3/2)/3 + C", "exp(-x)*sin(3*X)/10 + x**12", "-(x + 1)**11", "(9**99)**12"),
        False: (
            *("9**9**9", "9**(9**9)", "(9**99)**99", "((x + 1)**9 + 1)**9", "(x + y + z)**99", "x**999", "7//2"),
            *("factorial(99)", "S(1)", "x (1)", "x.diff", "x[0]", "'x'", "1e9", "sin(" * 9 + "x" + ")" * 9, ")("),
            "+".join("x" * 200),
        ),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert is_formula(text) is allowed


def test_literals_are_no_calls():
    assert is_literal("[['Q', '_'], ['_', 'Q']]")
    assert not is_literal("list('Q_')")
    assert not is_literal("(" * 5000)


def test_answers_that_blow_up_or_trick_a_scorer_are_not_shown_to_it(subtests):
    for family, answer in (
        *(("complex_arithmetic", "nan"), ("complex_arithmetic", "nan j"), ("rubiks_cube", "R99999999")),
        *(("rush_hour", "A+99999999"), ("propositional_logic", "∧".join("abcdefghijklmnopqrstuvwxyz"))),
        *(("propositional_logic", "PQ"), ("countdown", "9**9**9"), ("codeio", '{"a": ' * 2000)),
    ):
        with subtests.test(family=family):
            verdict = judged(f"<answer>{answer}</answer>", entry_of(family))
            assert (verdict.value, verdict.status) == (0.0, "no_answer")


def test_what_a_scorer_raises_is_no_answer_a_long_answer_is_not_read_and_the_entry_left_alone():
    verdict = judged("<answer>1 1</answer>", entry_of("prime_factorization"))
    assert (verdict.value, verdict.status) == (0.0, "no_answer")
    assert "ValueError" in verdict.detail
    assert judged("<answer>" + "7" * 30_000, SUM).status == "too_long"
    entry = json.loads(entry_of("chain_sum"))
    before = json.dumps(entry)
    judged("7", entry)
    assert json.dumps(entry) == before


def test_importing_the_rule_imports_no_library():
    code = "import sys, trl_ext.rewards.rules.procedural; sys.exit(len({'reasoning_gym', 'sympy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PIECES = st.sampled_from(
    ["<answer>", "</answer>", "<think>", "</think>", "1", "[", "]", "(", ")", "'", ",", "\n", "x", "**", "nan"]
)
TEXTS = st.text(st.characters(exclude_categories=())) | st.lists(PIECES, max_size=8).map("".join)


@given(text=TEXTS, family=st.sampled_from(FAMILIES))
def test_any_completion_gets_a_value(text, family):
    verdict = judged(text, entry_of(family))
    assert verdict.value is not None and 0.0 <= verdict.value <= 1.0
