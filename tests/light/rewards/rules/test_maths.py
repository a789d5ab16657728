"""Math as a rule: statuses, golds, extraction, the copy of a prompt, cache key, threads, random text."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.rewards import Answer, Math, Row, Rule, RuleSet, Verdict
from trl_ext.rewards.auditing.audit import FORMS, audit
from trl_ext.rewards.text.task import best, golds_of


def verdict_of(rule: Rule, text: str, gold: object, prompt: object = None) -> Verdict:
    return rule.score(Row(prompt, text, None, {"answer": gold}))


def judge(text: str, gold: object, prompt: object = None, **fields: str) -> Verdict:
    return verdict_of(Math(**fields), text, gold, prompt)


def value(text: str, gold: object, **fields: str) -> float | None:
    return judge(text, gold, **fields).value


def test_the_detail_says_what_was_read_where_and_which_path_decided():
    verdict = judge(r"so \boxed{\sqrt{117}}", r"$3\sqrt{13}$")
    assert verdict.detail == r"'\boxed': \sqrt{117}; gold: $3\sqrt{13}$; value"


def test_the_cache_key_is_the_same_for_the_same_answer_in_other_words():
    rule = Math()
    keys = {rule.cache_key(Row("p", rf"{words} \boxed{{5}}", None, {"answer": "5"})) for words in ("so", "hence")}
    assert len(keys) == 1
    assert rule.cache_key(Row("p", r"\boxed{6}", None, {"answer": "5"})) not in keys


def test_the_cache_key_tells_a_copy_of_the_prompt():
    rule = Math()
    rows = [Row(prompt, r"\boxed{2^{10}}", None, {"answer": "1024"}) for prompt in ("Compute 2^{10}", "How many?")]
    assert len({rule.cache_key(row) for row in rows}) == 2
    assert [rule.score(row).value for row in rows] == [0.0, 1.0]


def test_threads_give_the_verdicts_of_the_main_thread():
    golds = [rf"{number}\sqrt{{13}}" for number in range(1, 40)]
    texts = [rf"\boxed{{\sqrt{{{13 * number**2}}} + 0 \cdot \ln({number}) + x - x}}" for number in range(1, 40)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(partial(value, form="any"), texts * 3, golds * 3)) == {1.0}


def test_math_pickles():
    rule = Math(multiple="last", weight=0.5)
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_the_detail_says_why():
    verdict = judge(r"\boxed{5}", r"a_0+\ldots+a_n")
    assert verdict.detail.endswith(r"only the gold's own text can be compared: '\ldots' is not understood")


PIECES = st.sampled_from(
    [
        *"0123456789xyzie(){}[]|,;=<>+-*/^_!.$%& \n'\"~\\",
        *r"\frac \sqrt \boxed{ \left \right \{ \} \pi \infty \pm \cup \in \leq \text{ \text{cm}".split(),
        *r"\begin{pmatrix} \end{pmatrix} \\ \sum_{i=1}^{3} \binom \sin \ln \log_2 \overline \lfloor \rfloor".split(),
        *r"^\circ \% \$ \( \)".split(),
        *"<think> </think> <answer> </answer> #### A: or and not 1,000 0.5 \u0663 \u200b \ud800 \x00 √".split(),
        *"² é 答案".split(),
        "the answer is ",
        " dollars",
    ]
)
SOUP = st.lists(PIECES, max_size=40).map("".join)
TEXT = st.one_of(SOUP, SOUP.map("so \\boxed{{{}}}".format), st.text(max_size=60))


@pytest.mark.slow
@given(text=TEXT, gold=st.one_of(SOUP, st.sampled_from(["3", r"\frac12", "(1,2)", "x=5", r"3\sqrt{13}"])))
def test_random_text_gets_a_bounded_value(text, gold):
    rule = Math()
    row = Row(text[::-1], text, None, {"answer": gold})
    verdict = rule.score(row)
    assert verdict.value in (0.0, 1.0) or (verdict.value is None and verdict.status in ("gold_invalid", "undecided"))
    assert verdict == rule.score(row)
    hash(rule.cache_key(row))


# Several accepted golds in a cell: each is right, and what cannot be read next to one that can takes nothing away ---


def test_entries_and_cells_without_an_answer_are_left_out():
    assert golds_of(["NYC", "New York", "NYC", None, float("nan"), "  ", True]) == ["NYC", "New York"]
    assert [golds_of(cell) for cell in (None, float("nan"), [], [None], {"a": "4"}, True, [["4"]])] == [None] * 7


def test_equal_answers_of_rows_with_other_golds_share_no_verdict():
    rows = [Row(None, r"\boxed{18}", None, {"answer": golds}) for golds in (["18"], ["18", "20"], ["20"])]
    assert len({Math().cache_key(row) for row in rows}) == 3


def test_the_ideal_completion_states_the_first_gold():
    columns = {"answer": ["18", "20"]}
    assert verdict_of(Math(), Math().ideal(columns), columns["answer"]).value == 1.0
    assert "18" in Answer().ideal(columns)


def test_no_value_only_where_a_gold_may_still_be_met():
    wrong, open_ = Verdict(0.0), Verdict(None, "undecided")
    assert best([wrong, open_]) is open_
    assert best([open_, wrong, Verdict(1.0)]).value == 1.0
    assert best([Verdict(None, "gold_invalid"), wrong]) is wrong


@pytest.mark.slow
def test_ninety_nine_in_a_hundred_real_golds_are_paid_in_each_form(data_dir):
    rows = [json.loads(line) for line in (data_dir / "math500_first250.jsonl").read_text().splitlines()]
    (found,) = audit(RuleSet([Math()], isolate=False), rows, others=0).rules
    assert found.forms.keys() == FORMS.keys() and min(paid for paid, _ in found.forms.values()) >= 0.99 * len(rows)
