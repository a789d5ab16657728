"""Repetition: the share of n-grams that are new."""

import random

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.repetition import Repetition, num_different


def value_of(rule: Repetition, text: str, completion_ids: tuple[int, ...] | None = None) -> float | None:
    return rule.score(Row(None, text, completion_ids, {})).value


def test_repetition_is_counted_on_token_ids():
    assert value_of(Repetition(ngram=2), "all different words here", (1, 2, 1, 2, 1)) == 0.5


def test_repetition_falls_back_to_words():
    assert value_of(Repetition(ngram=1), "no no no yes") == 0.5
    assert value_of(Repetition(ngram=2), "好的好的好") == 0.5


def test_a_short_text_repeats_nothing_and_an_empty_one_earns_nothing():
    assert value_of(Repetition(), "one two") == 1.0
    assert value_of(Repetition(), "") == 0.0
    assert value_of(Repetition(), "", ()) == 0.0


def test_words_beyond_the_limit_are_not_counted():
    verdict = Repetition().score(Row(None, "a b " * 100_000, None, {}))
    assert (verdict.value, verdict.status) == (0.0, "too_long")


def test_repetition_refuses_ngrams_of_nothing():
    with pytest.raises(RuleError, match="ngram is 0"):
        Repetition(ngram=0)


@pytest.mark.parametrize("ngram", [1, 3, 5])
def test_many_ids_are_counted_as_few_are(ngram):
    draw = random.Random(ngram)
    for largest in (2, 30, 200_000, 2**40, 2**70):
        ids = tuple(draw.randrange(largest) for _ in range(200))
        assert num_different(ids, ngram) == len(set(zip(*(ids[start:] for start in range(ngram)), strict=False)))
