"""Math as a rule: statuses, golds, extraction, profiles, the copy of a prompt, cache key, threads, random text."""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.errors import SupportError
from trl_ext.rewards import Answer, Math, Row, Rule, Verdict
from trl_ext.rewards.text.golds import best, golds_of

pytest.importorskip("math_verify")


def verdict_of(rule: Rule, text: str, gold: object, prompt: object = None) -> Verdict:
    return rule.score(Row(prompt, text, None, {"answer": gold}))


def judge(text: str, gold: object, prompt: object = None, **fields: str) -> Verdict:
    return verdict_of(Math(**fields), text, gold, prompt)


def value(text: str, gold: object, **fields: str) -> float | None:
    return judge(text, gold, **fields).value


def test_a_gold_is_read_whole_in_every_usual_wrapping(subtests):
    for gold in (
        *(r"3\sqrt{13}", r"$3\sqrt{13}$", r"$$3\sqrt{13}$$", r"\[3\sqrt{13}\]", r"\(3\sqrt{13}\)"),
        *(r"\boxed{3\sqrt{13}}", r"#### 3\sqrt{13}", r"The distance is $\sqrt{9^2 + 6^2} = \boxed{3\sqrt{13}}.$"),
        r"We add 81 and 36. The answer is $3\sqrt{13}$.",
    ):
        with subtests.test(gold=gold):
            assert value(r"\boxed{\sqrt{117}}", gold) == 1.0
            assert value(r"\boxed{3}", gold) == value(r"\boxed{13}", gold) == 0.0


@pytest.mark.parametrize("gold", [18, 18.0, "18", "9 * 2 = 18\n#### 18", "A: 18", "$18.00"])
def test_a_number_is_a_gold_in_every_usual_spelling(gold):
    assert value("A: 18", gold) == 1.0


def test_a_gold_that_cannot_be_read_has_no_value(subtests):
    for gold in (
        *(None, True, [], float("nan"), "", "  ", "$", r"\boxed{}", r"3\sqrt{", r"\frac{1}", "{3"),
        *("no answer was written down here because the task was too hard for us", "1" * 10_000),
        "{" * 100 + "3" + "}" * 100,
    ):
        with subtests.test(gold=gold):
            verdict = judge("A: 3", gold)
            assert (verdict.value, verdict.status) == (None, "gold_invalid")


def test_the_answer_is_found_where_it_is_stated(subtests):
    for answer, texts in {
        "5": (
            *(r"\boxed{5} and that is it. A: 6", r"\fbox{5}", r"\boxed 5", r"\boxed{\boxed{5}}"),
            *(r"Write \boxed{}. So \boxed{5}", "<answer>5</answer> A: 6", "<answer>$5 a day</answer>"),
            *("2 + 3 = 5\n#### 5", "The final answer is 5.", "The answer is **5**.", "The answer is therefore 5 eggs"),
            *(
                "A: 5\nThat took 3 steps.",
                "the answer is 7. No, the answer is 5",
                "The answer is <<2+3=5>>5",
                "答案是5",
            ),
            *("$x = 5$", "so $x = 5$.", "So she has 5 eggs left."),
        ),
        "0.5": (
            *(r"\boxed{\frac{1}{2}} and }", "\\[ \\boxed{\n\\frac{1}{2}\n} \\]", r"<answer>$\frac12$</answer>"),
            *("The final answer is:\n\n$$\\frac{1}{2}$$\n", r"**Answer:** $\frac12$", r"\frac12"),
        ),
        "9": (r"The only number that is not prime is \boxed{9}.",),
        "10080": (r"so $7! \times 2!=\boxed{10,\!080}$", "so $7! \\times 2!=10,\\!080$ and the answer is $10080$"),
        r"3\sqrt2": (r"The answer is $3\sqrt2\text{ meters}$.",),
        "15": ("The answer is 3 * 5 = 15 eggs",),
        "B": ("The answer is (B) Paris.",),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert value(text, answer) == 1.0


def test_a_fault_of_the_completion_earns_the_floor_and_says_which(subtests):
    for text, status in (
        *(("", "no_answer"), ("no idea", "no_answer"), (r"\boxed{}", "no_answer"), (r"\boxed{3", "no_answer")),
        *((r"\boxed{\frac{1}}", "no_answer"), (r"<think>\boxed{3}", "no_answer")),
        *(("The answer is not 3", "no_answer"), (r"\boxed{3} \boxed{4}", "conflict")),
        *(("<answer>3</answer> <answer>4</answer>", "conflict"), ("The answer is $3$ or $4$", "conflict")),
        *((rf"\boxed{{{'1+' * 1500}1}}", "too_long"), (rf"\boxed{{{'1+' * 500}1}}", "too_complex")),
        *((r"\boxed{9^{9^9}}", "too_complex"), (r"\boxed{4}", "ok")),
    ):
        with subtests.test(text=text):
            verdict = judge(text, "3")
            assert (verdict.value, verdict.status) == (0.0, status)


def test_several_boxes_are_read_as_is_asked_for():
    assert value(r"\boxed{0.5} so \boxed{\frac12}", r"\frac{1}{2}") == 1.0
    assert value(r"\boxed{3} no, \boxed{4}", "4", multiple="last") == 1.0
    assert value(r"\boxed{3} no, \boxed{4}", "3", multiple="last") == 0.0
    assert value(r"\boxed{(x+1)^2} = \boxed{x^2+2x+1}", "x^2+2x+1", multiple="all_equal") == 1.0
    assert judge(r"\boxed{3} no, \boxed{4}", "4", multiple="all_equal").status == "conflict"


def test_thoughts_are_read_only_where_that_is_asked_for():
    text = r"<think>\boxed{3}</think> I do not know"
    assert value(text, "3") == 0.0
    assert value(text, "3", where="all") == 1.0


def test_a_term_of_the_prompt_is_right_only_where_it_is_the_gold_itself():
    prompt = "Which is larger, $2^{10}$ or $10^3$?"
    assert judge(r"\boxed{2^{10}}", "2^{10}", prompt).value == 1.0
    assert judge(r"\boxed{2^{10}}", "1024", prompt).value == 0.0
    assert judge(r"\boxed{1024}", "2^{10}", prompt).value == 1.0
    assert judge("A: 5.0", "5", "She has 5.0 cm of ribbon and loses none.").value == 1.0  # A number is no copy.


def test_the_eval_profile_is_as_lenient_as_math_verify(subtests):
    for answer, gold in (
        *(("5=3", "3"), ("0.5", r"50\%"), ("X+1", "x+1"), (r"\{1,2\}", "(1,2)"), ("0.333333333", r"\frac13")),
        (r"3 \text{ m}", r"3 \text{ cm}"),
    ):
        with subtests.test(answer=answer):
            assert value(rf"\boxed{{{answer}}}", gold, profile="eval") == 1.0
            assert value(rf"\boxed{{{answer}}}", gold) == 0.0
    for answer, gold in (("4", "3"), ("3", r"3\sqrt{13}"), (r"\text{seat}", r"\text{east}")):
        with subtests.test(answer=answer):
            assert value(rf"\boxed{{{answer}}}", gold, profile="eval") == 0.0


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


def test_a_missing_library_fails_at_construction_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(SupportError, match=r"trl_ext\[math\]"):
        Math()


# Golds that nothing but their own text can be compared with: told from the gold, never from the completion ----------


UNREADABLE = [
    *(r"a_0+\ldots+a_n", r"\int_0^1 f(x)\,dx", "The sum is less than zero.", r"a_n = a_1+\ldots+n", "9^{9^9}"),
    *(r"\sum_{n=0}^{\infty} x^{n}", r"\forall x: 3^x \geq x^2"),
]
READABLE = r"5|3\sqrt{13}|x = 5|(1, 2)|\{1, 2\}|x > 3|\text{east}|\text{(C)}|52_8|2x + 3".split("|")
ANSWERS = [
    *("5", "x+1", r"\text{hm}", "(1,2)", "x > 7", r"\foo{3}", "1, 2", r"a_0+\ldots+a_m", "0", r"\frac{1}{0}"),
    r"\sum_{k=0}^\infty x^k",
]
MISSING = ["", "no idea", r"\boxed{}", r"\boxed{3} and \boxed{4}", r"<think>\boxed{3}"]
MISSING += [r"\boxed{" + "1+" * 1500 + "1}"]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["train", "eval"])
@pytest.mark.parametrize("gold", UNREADABLE)
def test_any_answer_but_the_same_text_is_undecided(gold, profile):
    assert judge(rf"\boxed{{{gold}}}", gold, profile=profile).value == 1.0
    verdicts = {judge(rf"\boxed{{{answer}}}", gold, profile=profile) for answer in ANSWERS}
    assert {(verdict.value, verdict.status) for verdict in verdicts} == {(None, "undecided")}


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_missing_answer_earns_the_floor_whatever_the_gold(gold):
    assert {text: judge(text, gold).value for text in MISSING} == dict.fromkeys(MISSING, 0.0)


@pytest.mark.parametrize("gold", READABLE)
def test_no_answer_makes_a_readable_gold_undecided(gold):
    for text in (*(rf"\boxed{{{answer}}}" for answer in (*ANSWERS, *UNREADABLE)), *MISSING):
        assert judge(text, gold).value is not None, text


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


def test_each_accepted_text_is_right_and_no_other():
    aliases = ["New York City", "NYC", "New York"]
    for name in ("NYC", "New York", "new york city"):
        assert verdict_of(Answer(kind="exact"), f"The answer is {name}.", aliases).value == 1.0
    found = verdict_of(Answer(kind="exact"), "The answer is York.", aliases[:2])
    assert (found.value, found.status) == (0.0, "ok")


def test_each_of_several_golds_is_right_and_two_answers_are_a_conflict():
    for rule in (Answer(), Math()):
        assert [verdict_of(rule, f"\\boxed{{{n}}}", [18, "20"]).value for n in (18, 20, 19)] == [1.0, 1.0, 0.0]
    assert verdict_of(Math(), r"\boxed{18} or \boxed{20}", ["18", "20"]).status == "conflict"


def test_a_gold_that_cannot_be_read_counts_only_alone():
    assert verdict_of(Answer(), "A: 18", ["eighteen apples", "18"]).value == 1.0
    assert verdict_of(Answer(), "A: 17", ["eighteen apples", "18"]).value == 0.0
    assert verdict_of(Answer(), "A: 17", ["eighteen apples", "many"]).status == "gold_invalid"


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
