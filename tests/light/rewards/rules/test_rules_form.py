"""Rules of form (Tags, Length, Repetition, Pattern), functions as rules, names and weights."""

import pickle
import random

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import (
    Call,
    Length,
    Pattern,
    Repetition,
    Row,
    Rule,
    RuleSet,
    Tags,
    Verdict,
)
from trl_ext.rewards.rules.repetition import num_different


def judged(rule: Rule, text: str, num_tokens: int | None = None) -> Verdict:
    return rule.score(Row(None, text, None if num_tokens is None else tuple(range(num_tokens)), {}))


def values_of(rule: Rule, *texts: str | int) -> list[float | None]:
    """The values of texts, and of numbers of tokens."""
    return [judged(rule, *(("A: 18", one) if isinstance(one, int) else (one,))).value for one in texts]


def test_tags_give_the_share_of_pairs_that_are_right(subtests):
    for value, texts in {
        1.0: ("<think>2+2</think> so <answer>4</answer>",),
        0.5: (
            *("<think>2+2</think> 4", "<think> </think><answer>4</answer>", "<think>\u200b</think><answer>4</answer>"),
            *("<answer>4</answer><think>2+2</think>", "<think><answer>4</answer></think>"),
            *("<think>a</think><think>b</think><answer>4</answer>", "<think>2+2</think><answer>4"),
        ),
        0.0: ("</think>a<think></answer>4<answer>", ""),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert judged(Tags("think", "answer"), text).value == value
    detail = judged(Tags("think", "answer"), "<think>a</think>").detail
    assert detail == "not once, closed, filled and in order: answer"


def test_a_field_that_tags_do_not_have_is_named_with_those_that_they_have():
    with pytest.raises(TypeError, match="Tags has no field 'wieght'; there are tags, weight, gate"):
        Tags("think", wieght=0.1)


CLOSED = "2+2</think> so <answer>4</answer>"
THOUGHT = f"<think>{CLOSED}"


@pytest.mark.parametrize(
    ("prompt_end", "text", "value"),
    [
        ("<|assistant|><think>\n", CLOSED, 1.0),
        ("<|assistant|><think>", f"\n{CLOSED}", 1.0),
        ("<|assistant|><think>\n", "</think> so <answer>4</answer>", 0.5),
        ("<|assistant|><think>\n", "2+2 so <answer>4</answer>", 0.5),
        ("<|assistant|><think>\n", THOUGHT, 0.5),  # twice
        ("<|assistant|><think>\n\n</think>\n\n", CLOSED, 0.5),
        ("<|assistant|><think>\n\n</think>\n\n", "<answer>4</answer>", 0.5),
        ("<|assistant|><think>\n\n</think>\n\n", THOUGHT, 1.0),
        ("<|assistant|><think>\nOkay, ", CLOSED, 0.5),
        ("<|assistant|><thought>", CLOSED, 0.5),
        ("", CLOSED, 0.5),
        ("", THOUGHT, 1.0),
    ],
)
def test_a_tag_that_the_prompt_ends_with_counts_as_opened(prompt_end, text, value):
    rules = RuleSet([Tags("think", "answer")])
    assert rules.explain(f"2+2?{prompt_end}", text).total == value
    messages = [{"role": "user", "content": "Write in <think>"}]
    rules.prompt_end = prompt_end
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert rules.explain(messages, completion).total == value
        assert [column(prompts=[messages], completions=[completion]) for column in rules.split()] == [[value]]


# Hangul filler, braille blank, non-breaking spaces as HTML writes them, and marks that join nothing.
BLANKS = ("\u3164", "\u2800", "&nbsp;", "&#160; &#xA0;", "&zwnj;\u200b", "\u115f\uffa0", "\u034f \u2063")


@pytest.mark.parametrize("blank", BLANKS)
def test_letters_and_entities_that_show_nothing_fill_no_tag(blank):
    assert judged(Tags("answer"), f"<answer>{blank}</answer>").value == 0.0
    assert judged(Tags("answer"), f"<answer>{blank}4{blank}</answer>").value == 1.0


@pytest.mark.parametrize("text", ["&", "&lt;", "&amp;nbsp;", "&#" + "9" * 5000 + ";", "R&D", "\u2801", ")"])
def test_what_can_be_seen_fills_a_tag(text):
    assert judged(Tags("answer"), f"<answer>{text}</answer>").value == 1.0


@pytest.mark.parametrize("padding", ["\u200b", " ", "\n", "\u3164", "\u200b ", "\u2800 ", "\0"])
@pytest.mark.parametrize("unit", ["chars", "words"])
def test_what_cannot_be_seen_lengthens_no_text_but_counts_against_the_most(padding, unit):
    enough, most = Length(low=20, unit=unit), Length(high=50, unit="chars")
    assert judged(enough, f"It is 18.{padding * 100}").value == judged(enough, f"It{padding * 100}is 18.").value == 0.0
    assert judged(most, f"It is 18.{padding * 100}").value == 0.0
    assert judged(enough, "one two " * 10).value == 1.0


def test_a_length_falls_linearly_on_both_sides_in_tokens_characters_or_words():
    assert values_of(Length(low=2, high=4, slack=2), 1, 2, 4, 5, 6, 60) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert values_of(Length(high=1), 1, 2) == [1.0, 0.0], "without slack it is a hard limit"
    assert values_of(Length(low=5, high=5, unit="chars"), "a b c") == [1.0]
    assert values_of(Length(low=3, high=3, unit="words"), "a b c", "做数学") == [1.0, 1.0]


def test_what_counts_tokens_needs_completion_ids():
    with pytest.raises(RuleError, match="no completion_ids"):
        judged(Length(), "a b c")


def test_repetition_is_counted_on_token_ids_or_else_on_words():
    row = Row(None, "all different words here", (1, 2, 1, 2, 1), {})
    assert Repetition(ngram=2).score(row).value == 0.5
    assert values_of(Repetition(ngram=1), "no no no yes") == values_of(Repetition(ngram=2), "好的好的好") == [0.5]
    assert values_of(Repetition(), "one two", "") == [1.0, 0.0], "a short text repeats nothing"
    assert judged(Repetition(), "", 0).value == 0.0


@pytest.mark.parametrize("ngram", [1, 3, 5])
def test_many_ids_are_counted_as_few_are(ngram):
    draw = random.Random(ngram)
    for largest in (2, 30, 200_000, 2**40, 2**70):
        ids = tuple(draw.randrange(largest) for _ in range(200))
        assert num_different(ids, ngram) == len(set(zip(*(ids[start:] for start in range(ngram)), strict=False)))


def test_a_pattern_matches_the_whole_stripped_text_or_any_part():
    assert values_of(Pattern(r"-?\d+"), " -18\n", "-18 eggs") == [1.0, 0.0]
    assert values_of(Pattern(r"^A: \d+$", mode="search"), "A: 18", "so A: 18", "") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["full", "search"])
def test_a_pattern_that_explodes_is_given_up(mode):
    verdict = judged(Pattern(r"(a|aa)+$", mode=mode, timeout_s=0.01), "a" * 60 + "!")
    assert (verdict.value, verdict.status) == (0.0, "timeout")


@pytest.mark.parametrize(("rule", "text"), [(Pattern(r"a+"), "a" * 250_001), (Repetition(), "a b " * 100_000)])
def test_a_text_beyond_the_limit_is_not_read(rule, text):
    assert (judged(rule, text).value, judged(rule, text).status) == (0.0, "too_long")


def shouts(row: Row) -> float:
    return float(row.text.isupper())


@pytest.mark.slow
def test_a_function_becomes_a_rule_named_after_it_and_a_lambda_does_not():
    rules = RuleSet([Call(shouts, weight=0.5)])
    assert rules.rules[0].name == "shouts"
    assert pickle.loads(pickle.dumps(rules))(completions=["HEY", "hey"]) == [0.5, 0.0]
    with pytest.raises(RuleError, match="does not pickle"):
        Call(lambda row: 1.0)


class SoftHTMLLimit(Rule):
    def score(self, row: Row) -> Verdict:
        return Verdict(1.0)


def test_a_rule_is_named_after_its_class_or_so_that_it_fits_into_a_metric_key(subtests):
    assert SoftHTMLLimit().name == "soft_html_limit"
    for name in ("a/b", "a b", 3):
        with subtests.test(name=name), pytest.raises(RuleError, match="is named"):
            SoftHTMLLimit(name=name)


def test_a_weight_is_a_finite_number(subtests):
    for weight in (float("nan"), float("inf"), "1e-3", None, True):
        with subtests.test(weight=weight), pytest.raises(RuleError, match="weight is"):
            SoftHTMLLimit(weight=weight)
