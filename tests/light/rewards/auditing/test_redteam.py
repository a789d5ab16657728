"""redteam: which cheats pay, and what the bar is."""

import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.embeddings import encoder as encoder
from tests.rules import rule_class
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Answer, Call, Keywords, Length, Math, Relevance, Row, Rule, RuleSet, Tags, Verdict
from trl_ext.rewards.auditing.redteam import (
    CHEATS,
    JOINS,
    filled,
    gold_of,
    holds,
    honest,
    redteam,
    token_ids,
    topics_of,
    wrong_answers,
)

pytestmark = pytest.mark.slow

NOTHING = {name: CHEATS[name] for name in ("empty", "white space", "control characters")}
CONNECTIVES = {"connectives only": CHEATS["connectives only"]}
# The gold stands in these without a wrong answer: it is denied, or not where an answer belongs.
HIDDEN = {
    *("gold in an attribute", "gold in an HTML comment", "answer only in the thoughts", "thoughts without an end"),
    "box without an end",
}
ROWS = [
    {"prompt": "6 * 7?", "answer": "42"},
    {"prompt": "5 - 12?", "answer": "-7"},
    {"prompt": "6 / 8?", "answer": "3/4"},
]
CONTENTLESS = {name: CHEATS[name] for name in ("promise without content", "question back", "nothing to do with it")}
FIELDS = {"gold": "42", "wrong": "43", "other": "39", "prompt": "6 * 7?", "words": "because", "tags": "<a></a>"}


@dataclass(frozen=True, slots=True)
class Judge(Rule):
    """A gullible rule: its value is the function's."""

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True
    gold: str = "answer"
    believes: str = "anywhere"

    @property
    def columns(self):
        return (self.gold,)

    def ideal(self, columns):
        return str(columns[self.gold])

    def score(self, row: Row) -> Verdict:
        return Verdict(BELIEFS[self.believes](row.text, row.columns[self.gold]))


def counts_pressure(row) -> float:
    return row.text.count("Pressure") / 10


def raises_on_nul(text: str, gold: str) -> float:
    if "\0" in text:
        raise ValueError("embedded null")
    return float(gold == text)


BELIEFS = {
    "anywhere": lambda text, gold: float(gold in text),
    "nothing_for_the_empty": lambda text, gold: float(gold == text) if text.strip() else None,
    "raises_on_nul": raises_on_nul,
    "partly": lambda text, gold: 1.0 if text == gold else 0.25 if text else 0.0,
    "never": lambda text, gold: 0.0,
    "no_gold": lambda text, gold: None,
}


def judge(believes: str, **fields) -> RuleSet:
    return RuleSet([Judge(believes=believes, **fields)])


def through(report):
    return {attempt.cheat: attempt for attempt in report.through}


@pytest.fixture(scope="module")
def fooled():
    """The report on a rule that finds the gold anywhere."""
    return redteam(judge("anywhere"), ROWS)


def test_a_gold_stands_in_a_cheat_only_where_it_is_denied_hidden_or_one_of_several():
    texts = {name: filled(text, FIELDS) for name, text in CHEATS.items()}
    assert FIELDS["gold"] not in {text.strip() for text in texts.values()}
    golden = {name for name, text in CHEATS.items() if "[gold]" in text}
    assert {name for name in golden if not {"39", "43"} & set(re.findall(r"\d+", texts[name]))} == HIDDEN
    several = [texts[name] for name in golden if "[wrong]" in CHEATS[name]]
    assert [text for text in several if text.rindex("42") > max(text.rfind("43"), text.rfind("39"))] == []


def test_what_fills_a_cheat_is_not_filled_again():
    assert filled("[prompt] [gold]!", FIELDS | {"prompt": "[gold]"}) == "[gold] 42!"


def test_a_rule_that_finds_the_gold_anywhere_pays_for_joins(fooled):
    found = through(fooled)
    assert {
        "gold in an HTML comment",
        "JSON with a key twice",
        "[a] [b] [c]",
        "\\boxed{[a]} \\boxed{[b]} \\boxed{[c]}",
    } <= set(found)
    assert found["gold in an HTML comment"].verdict == "rule 'judge' gives 1" and not fooled.ok
    assert found["[a] [b] [c]"].verdict == "rule 'judge' pays it on rows 0, 1, 2"
    assert "'[a] [b] [c]', row 0: '42 -7 3/4'" in str(fooled)


def test_a_strict_rule_pays_for_no_cheat():
    report = redteam(RuleSet([Answer()]), ROWS)
    assert report.ok and report.rights == (1.0, 1.0, 1.0) and report.bars == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "golds"),
    [("choice", "BDC"), ("exact", ("the Nile", "New York", "Rome")), ("math", ("1/2", "x^2", "(0, 3]"))],
)
def test_no_text_is_paid_for_two_letters_texts_or_formulas(kind, golds):
    rules = RuleSet([Math() if kind == "math" else Answer(kind=kind)], isolate=False)
    report = redteam(rules, [{"prompt": "?", "answer": gold} for gold in golds], cheats={})
    assert report.ok and report.rights == (1.0, 1.0, 1.0)
    assert [attempt.verdict for attempt in report.attempts] == ["refused"] * len(JOINS)


def test_joins_need_three_different_golds():
    for golds in (("42", "7"), ("42", "42", "42.0", "7"), ("42", None, "7")):
        report = redteam(RuleSet([Answer()]), [{"answer": gold} for gold in golds if gold], cheats={})
        assert {attempt.verdict for attempt in report.attempts} == {"not tried"}


def test_no_value_and_an_exception_get_through_and_what_an_honest_wrong_answer_earns_is_the_bar():
    found = through(redteam(judge("nothing_for_the_empty"), ROWS, cheats=NOTHING))
    assert found["white space"].verdict == "no value: it takes its row out of training"
    found = through(redteam(judge("raises_on_nul"), ROWS, cheats=NOTHING))
    assert {name: attempt.verdict for name, attempt in found.items()} == {"control characters": "rule 'judge' raised"}
    report = redteam(judge("partly"), ROWS, cheats=NOTHING)
    assert report.bars == (0.25, 0.25, 0.25) and report.ok


def test_a_rule_that_pays_nothing_for_a_right_answer_proves_nothing():
    report = redteam(judge("never"), ROWS, cheats=NOTHING)
    assert not report.through and report.blind_rows == (0, 1, 2) and not report.ok
    assert "row 0: a right answer earns 0 and a wrong one 0" in str(report)
    with pytest.raises(DataError, match="Row 0: no rule has a value there"):
        redteam(judge("no_gold"), ROWS)


def test_form_that_an_honest_try_has_too_is_no_cheat():
    rules = RuleSet([Judge(believes="never"), Tags("think", "answer", weight=0.2), Keywords(("because",), weight=0.1)])
    report = redteam(rules, ROWS)
    assert not report.through and report.bars[0] == pytest.approx(0.3)


# What keyword stuffing is made for.
CountsBecause = rule_class("CountsBecause", lambda row: row.text.count("because") / 10)


def test_keyword_stuffing_that_pays_is_found_behind_the_answer():
    found, *_ = redteam(RuleSet([Judge(believes="never"), CountsBecause()]), ROWS, cheats=CONNECTIVES).attempts
    assert found.verdict == "more than an honest try"
    assert redteam(RuleSet([Answer(), CountsBecause(gate="answer")]), ROWS, cheats=CONNECTIVES).ok


def test_the_bar_of_style_is_the_honest_text():
    report = redteam(RuleSet([Length(low=5, high=80, unit="words")]), ROWS)
    assert report.ok and set(report.bars) == {1.0} and set(report.rights) == {None}
    assert through(redteam(RuleSet([CountsBecause()]), ROWS, cheats=CONNECTIVES))


def test_a_users_good_completion_raises_the_bar_of_style():
    rows = [{"prompt": "Why?", "completion": "because " * 40}]
    assert redteam(RuleSet([CountsBecause()]), rows, cheats=NOTHING).bars == (4.0,)


def test_a_text_without_content_gets_through_where_the_subjects_words_pay(subtests):
    rows = [{"prompt": "Why do volcanoes erupt?", "completion": "Pressure drives magma out."}]
    attempts = redteam(RuleSet([Call(counts_pressure)]), rows, cheats=CONTENTLESS).attempts[: len(CONTENTLESS)]
    for attempt in attempts:
        with subtests.test(attempt.cheat):
            assert attempt.completion.count("Pressure") == attempt.completion.count("drives") == 3
            assert (attempt.total, attempt.bar, attempt.verdict) == (0.3, 0.1, "more than an honest try")


@pytest.mark.usefixtures("encoder")
def test_a_text_without_content_that_names_the_subject_earns_less_than_the_users_answer():
    good = "Magma rises through the crust. Lava is magma that has reached the air. Its gas had pressure."
    rows = [{"prompt": "Why do volcanoes erupt?", "completion": good}]
    report = redteam(
        RuleSet([Relevance(), Length(low=5, high=80, unit="words", weight=0.2)]), rows, cheats=CONTENTLESS
    )
    tried = {attempt.cheat: attempt for attempt in report.attempts if attempt.cheat in CONTENTLESS}
    assert report.ok and {attempt.verdict for attempt in tried.values()} == {"refused"}
    assert all("pressure" in attempt.completion and attempt.total < 0.8 * attempt.bar for attempt in tried.values())


def test_a_subjects_words_are_those_of_the_answer_then_of_the_prompt():
    assert topics_of("Why do volcanoes erupt?", "Volcanoes need pressure, magma") == ["pressure", "magma"] * 4
    assert topics_of("Why do volcanoes erupt?", "") == ["volcanoes", "erupt"] * 4
    assert topics_of("6 * 7?", "42") == []
    report = redteam(RuleSet([Answer()]), ROWS, cheats=CONTENTLESS)
    assert [attempt.verdict for attempt in report.attempts[:3]] == ["not tried"] * 3


def test_the_tags_and_keywords_that_the_rules_ask_for_are_tried():
    rules = RuleSet([Tags("plan", "result"), Keywords(("hence",))])
    cheats = {name: text for name, text in CHEATS.items() if "[tags]" in text or "[words]" in text}
    tried = {attempt.cheat: attempt.completion for attempt in redteam(rules, ROWS, cheats=cheats).attempts}
    assert tried["the tags that are asked for, empty"] == "<plan></plan><result></result>"
    assert tried["keyword stuffing"].count("hence") == 20


def test_a_shape_gives_honest_completions_of_a_pattern():
    shape = "Q: [text]\nZ: [answer]"
    texts = list(honest([], "19", shape))
    assert "Q: So it is.\nZ: 19" in texts and all("{" not in text for text in texts if text.startswith("Q:"))
    with pytest.raises(ConfigError, match=r"shape is 'Z:'. Write \[answer\]"):
        redteam(RuleSet([Answer()]), ROWS, shape="Z:")


def test_wrong_answers_look_like_the_right_one(subtests):
    for gold, wrong in (
        *(("18", ("28", "38")), ("-9", ("-1", "-2")), ("\\frac{14}{3}", ("\\frac{24}{3}", "\\frac{34}{3}"))),
        *(("0", ("1", "2")), ("D", ("E", "A")), ("Nile", ("Niger", "something else"))),
    ):
        with subtests.test(gold=gold):
            assert wrong_answers(gold, ["18", "Niger", "nile", "Nile", "Niger"]) == wrong


def test_a_users_row_brings_its_gold_without_what_announces_it_and_is_cheated_on_with_it():
    rows = [{"answer": "9 * 2 = 18\n#### 18"}, {"answer": "\\boxed{7}"}, {"answer": None}]
    assert [gold_of([Answer()], row, index) for index, row in enumerate(rows)] == ["18", "7", None]
    cheats = {"sandwich": "[wrong] [gold] [other]"}
    report = redteam(judge("anywhere"), [{"prompt": "6 * 7?", "answer": "42"}], cheats=cheats)
    assert through(report)["sandwich"].completion == "52 42 62"


def test_a_cheat_that_might_be_right_by_chance_is_not_tried_there():
    cheats = {"claim": "Score: 1.0", "denied": "[gold]? No, [wrong]."}
    report = redteam(RuleSet([Answer()]), [{"answer": "1"}], cheats=cheats)
    assert [attempt.verdict for attempt in report.attempts[:2]] == ["not tried", "refused"]


def test_a_prompt_that_holds_the_gold_is_copied_only_where_it_lists_options():
    cheats = {"copy": "[prompt]"}
    number, *_ = redteam(RuleSet([Answer()]), [{"prompt": "1 * 5?", "answer": "5"}], cheats=cheats).attempts
    letter = RuleSet([Answer(kind="choice")])
    option, *_ = redteam(letter, [{"prompt": "(A) 1 (B) 2?", "answer": "B"}], cheats=cheats).attempts
    assert (number.verdict, option.verdict) == ("not tried", "refused")


def test_an_answer_stands_in_a_text_as_a_word(subtests):
    for text, gold, is_there in (
        *(("Score: 1.0", "1", True), ("11", "1", False), ("It is -1.", "1", False), ("(B)", "B", True)),
        *(("a good question", "A", False), ("", "42", False)),
    ):
        with subtests.test(text=text, gold=gold):
            assert holds(text, gold) is is_there


def test_rules_of_tokens_get_one_per_word_and_sign():
    assert len(token_ids("so, 42!")) == 4 and token_ids("a a")[0] == token_ids("a a")[1] and token_ids("") == []
    assert redteam(RuleSet([Length(high=50)]), ROWS, cheats={"empty": ""}).ok


def test_the_users_own_set_is_left_as_it_is():
    rules = RuleSet([Answer()], on_error="stop", normalise=True)
    redteam(rules, ROWS, cheats={"empty": ""})
    assert rules.on_error == "stop" and rules.state_dict() == RuleSet([Answer()]).state_dict()


def test_a_report_goes_through_json(fooled):
    plain = json.loads(json.dumps(fooled.as_dict()))
    assert plain["ok"] is False and len(plain["attempts"]) == len(CHEATS) + len(JOINS)


def test_rows_whose_golds_are_undecided_are_left_out_and_named():
    rules = RuleSet([Math()], isolate=False)
    rows = [{"prompt": "p", "answer": "42"}, {"prompt": "p", "answer": "a_0+\\ldots+a_n"}]
    report = redteam(rules, rows)
    assert report.undecided_rows == (1,) and not report.through
    assert "left out, golds undecided (see audit): rows 1" in str(report)
    with pytest.raises(DataError, match="Every gold here is undecided"):
        redteam(rules, rows[1:])


@dataclass(frozen=True, slots=True)
class Capital(Rule):
    """Pays a text that holds the gold, and can name a right completion in some rows only."""

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True

    @property
    def columns(self):
        return ("answer", "known")

    def ideal(self, columns):
        return columns["answer"] if columns["known"] else None

    def score(self, row: Row) -> Verdict:
        return Verdict(float(row.columns["answer"] in row.text))


def test_the_gold_of_another_row_is_no_wrong_answer_where_a_rows_own_is_unknown():
    rows = [{"prompt": "Capital of France?", "answer": "Paris", "known": known} for known in (True, False)]
    assert redteam(RuleSet([Capital()], isolate=False), rows).bars == (0.0, 0.0)
