"""Answers to open questions: an accepted answer is paid, and no text is paid for two golds."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Row, RuleSet

CAPITAL = "What is the capital of France?"
CANDIDATES = [
    ("Who wrote the play?", ("William Shakespeare", "Christopher Marlowe", "Ben Jonson")),
    ("When did it open?", ("1905", "1912", "1923")),
    ("Where was it signed?", ("Paris", "Lyon", "Marseille")),
    ("How many were there?", ("seven", "twelve", "thirty")),
]
# With verbs, with dashes, with signs, bare, in lines, announced, in boxes and in tags.
JOINS = (
    *("{a} is one; {b} is two; {c} is three", "{a} wrote it with {b} for {c}", "{a} beats {b}, who beat {c}"),
    *("It is {a}. It is {b}.", "{a} was called {b} was called {c}", "{a}, who is neither {b} nor {c}"),
    *("{a}-{b}-{c}", "{a} \u2013 {b}", "{a} \u2014 {b} \u2014 {c}", "{a}\u2013{b}", "{a} to {b}", "{a}/{b}/{c}"),
    *("{a} {b} {c}", "{a} {b}", "{a}, {b}, {c}", "{a}; {b}", "{a} or {b}", "{a} and {b}", "{a} ({b})", "{a} | {b}"),
    *("{a}\n{b}\n{c}", "- {a}\n- {b}", "1. {a}\n2. {b}", "{q} {a} {b} {c}", "{q} {a}. {b}. {c}."),
    *("The answer is {a}, formerly {b}", "The answer is {a}\nThe answer is {b}", "<answer>{a} {b}</answer>"),
    *(r"\boxed{{{a}}} \boxed{{{b}}}", "<answer>{a}</answer><answer>{b}</answer>", "#### {a}\n#### {b}"),
)


def verdict_of(text: str, gold: object, question: str = CAPITAL, **fields: str):
    return Answer(kind="qa", **fields).score(Row(question, text, None, {"answer": gold}))


@pytest.mark.parametrize("join", JOINS)
def test_no_join_of_candidates_earns_more_than_one_of_them(join):
    """Each candidate is right as often as the others: one alone earns a third of the golds."""
    for question, candidates in CANDIDATES:
        text = join.format(q=question, **dict(zip("abc", candidates, strict=True)))
        assert sum(verdict_of(text, [gold], question).value for gold in candidates) <= 1.0


def test_statuses_tell_why():
    texts = ("Lyon", r"\boxed{Paris}\boxed{Lyon}", "The answer is not Paris.", "")
    assert [verdict_of(text, "Paris").status for text in texts] == ["ok", "conflict", "no_answer", "no_answer"]
    assert verdict_of("Paris", {"aliases": None}).status == "gold_invalid"


def test_exact_and_f1_are_those_of_squad():
    golds = ["the Eiffel Tower", "La tour Eiffel"]
    assert verdict_of("The answer is Eiffel tower.", golds).value == 1.0
    assert verdict_of("It is the Eiffel Tower", golds).value == 0.0
    assert verdict_of("It is the Eiffel Tower", golds, match="f1").value == pytest.approx(2 * 2 / (4 + 2))


def test_a_match_that_is_unknown_or_has_no_effect_or_pays_lists_is_refused():
    with pytest.raises(RuleError, match="match is for kind: qa"):
        Answer(match="f1")
    with pytest.raises(RuleError, match="match is 'contains'"):
        Answer(kind="qa", match="contains")


def test_a_list_column_in_yaml_is_judged_through_a_rule_set(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {rule: answer, kind: qa, gold: aliases}\n", encoding="utf-8")
    rules = RuleSet.from_yaml(file)
    prompts = [[{"role": "user", "content": CAPITAL}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("The answer is Paris.", "Paris or Rome")]
    assert rules(prompts=prompts, completions=completions, aliases=[["Paris", "Lutetia"]] * 2) == [1.0, 0.0]
    rules.close()
