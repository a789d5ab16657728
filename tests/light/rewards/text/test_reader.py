"""The one reader of answers: its time, and what a rule set does with its verdicts."""

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer, RuleSet
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.text.announcements import Strength
from trl_ext.rewards.text.phrases import LANGUAGES
from trl_ext.rewards.text.reader import Candidate, choose

HOSTILE = "answer: |not |not a |the answer to |is wrong that |A:\n|####|I choose |B is |is ".split("|")
ABROAD = "答案 |答案是不是|선택지는 |Ответ не — |antwort a b c |opción correcta |选项是|forty (4|1 234 |7:00 ".split(
    "|"
)


@pytest.mark.parametrize(
    "piece",
    [
        *HOSTILE,
        "(A) ",
        "\nanswer\n",
        "option ",
        "answer is 42 is ",
        *ABROAD,
        "B 或 ",
        '\n{"answer": ',
        "42, not ",
        "$1$ ",
    ],
)
def test_reading_takes_time_linear_in_the_text(piece):
    row = Row(None, piece * (60_000 // len(piece)), None, {"answer": "42", "letter": "B"})
    rules = [Answer(), Answer(gold="letter", kind="choice"), Math(), Math(gold="letter")]
    assert timed(lambda: [rule.score(row) for rule in rules])[1] < 1.0


def test_a_rule_set_pays_the_value_and_leaves_out_what_is_undecided():
    rules = RuleSet([Answer()], on_unscored="warn")
    texts = ["答案是3万", "答案是3万", "Die Antwort ist 1.234."]
    rewards = rules(prompts=["?"] * 3, completions=texts, answer=["30000", "3", "1234"])
    assert rewards == [1.0, 0.0, None]
    rules.close()


def test_the_strongest_candidate_is_chosen_and_of_equals_the_latest():
    box = Candidate("box", ("1",), end=5)
    early, late = (Candidate(str(end), ("2",), end=end, strength=Strength.PHRASE) for end in (2, 9))
    correction = Candidate("final", ("3",), end=7, strength=Strength.PHRASE, before="So the final ")
    bare = Candidate("bare", ("4",), end=20, strength=Strength.BARE)
    assert choose([]) is None
    assert choose([bare, late, early]) is late
    assert choose([bare, late, box, early]) is box
    assert choose([late, correction, box, early]) is correction


def test_no_candidate_before_a_strongest_candidate_is_read():
    late = Candidate("late", ("2",), end=9, strength=Strength.PHRASE)
    candidates = iter([late, Candidate("early", ("1",), end=2, strength=Strength.PHRASE)])
    assert choose(candidates, Strength.PHRASE) is late
    assert len([*candidates]) == 1


def test_each_row_of_the_table_finds_words_in_lower_case_for_a_kind_that_exists():
    rows = [row for language in LANGUAGES for row in language.announcements]
    assert {row.kind for row in rows} == {"any", "choice", "value"}
    assert all(row.words == row.words.lower() and all(row.words.split("|")) for row in rows)
