"""Instructions: the column, strictness, bad rows, and texts that try to break the tests."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processor_time import timed
from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.instruction_kinds.instructions import _FUNCTIONS, KNOWN, Instructions

NO_COMMA, TITLE = "punctuation:no_comma", "detectable_format:title"
TWO = {"instruction_id_list": [NO_COMMA, TITLE], "kwargs": [{}, {}]}

COUNTS = (
    "frequency let_frequency capital_frequency num_words num_sentences num_paragraphs num_placeholders num_bullets"
)
COUNTS += " num_highlights num_sections N small_n n_end"
TEXTS_OF = "keyword letter last_word keyword1 keyword2"
ARGUMENTS = {
    **dict.fromkeys(COUNTS.split(), 2),
    **dict.fromkeys(TEXTS_OF.split(), "a"),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), "at least"),
    **{"keywords": ["sun", "a"], "forbidden_words": ["cat", "."], "first_word": "so", "postscript_marker": "P.P.S"},
    **{"prompt_to_repeat": "Say it", "end_phrase": "Any more?", "section_spliter": "#", "language": "zh"},
    **{
        "n": 1,
        "m": 1,
        "nth_paragraph": 2,
        "options": "a/b",
        "n_start": 0,
        "phrase": "a p. a",
        "n_sent": 1,
        "n_words": 2,
    },
}
ALL = [{"id": name, **{key: ARGUMENTS[key] for key in KNOWN[name].arguments}} for name in KNOWN]


def judged(text: str, instructions: object, **fields: object) -> Verdict:
    return Instructions(**fields).score(Row(None, text, None, {"instructions": instructions}))


SHAPES = (
    *(TWO, json.dumps(TWO), [{"id": NO_COMMA}, {"id": TITLE}], json.dumps([{"id": NO_COMMA}, {"id": TITLE}])),
    [{"instruction_id": [NO_COMMA, TITLE], "kwargs": [None, {}]}],
    str([{"instruction_id": [NO_COMMA, TITLE], "kwargs": [None, {"N": None}]}]),
    {"key": 1, "instruction_id_list": [NO_COMMA, TITLE], "kwargs": [None, {"num_words": None}]},
)


def test_a_cell_has_one_of_several_shapes(subtests):
    for cell in SHAPES:
        with subtests.test(cell=cell):
            assert judged("<<Ode>> to joy", cell).value == 1.0
            assert judged("Ode, to joy", cell).value == 0.0


FUNCTIONS = [
    ({"func_name": "validate_title", "N": None}, "<<Ode>>", "Ode"),
    ({"func_name": "verify_keyword_frequency", "word": "sun", "N": 2}, "sun, sun", "sun, sun, sun"),
    ({"func_name": "validate_word_constraint", "N": 10, "quantifier": "around"}, "a " * 11, "a " * 12),
    ({"func_name": "verify_letter_frequency", "letter": "a", "N": 1}, "cat", "banana"),
    ({"func_name": "validate_choice", "options": ["yes", "no"]}, "Yes.", "maybe"),
    ({"func_name": "validate_paragraphs", "N": 2, "first_word": "so", "i": 2}, "a\n\nso b", "a\n\nb"),
    ({"func_name": "validate_sections", "N": 1, "section_splitter": "SECTION"}, "SECTION 1\na", "a"),
    ({"func_name": "validate_repeat_prompt", "original_prompt": "Say it"}, "Say it: it", "it"),
]


def test_functions_of_rlvr_ifeval_are_known_by_name(subtests):
    for cell, right, wrong in FUNCTIONS:
        with subtests.test(cell=cell):
            assert judged(right, json.dumps(cell)).value == 1.0
            assert judged(wrong, json.dumps(cell)).value == 0.0


def test_each_function_of_rlvr_ifeval_names_an_instruction_and_its_arguments():
    assert len(_FUNCTIONS) == 25
    for name, *pairs in map(str.split, _FUNCTIONS.values()):
        assert set(KNOWN[name].arguments) >= {pair.split("=")[1] for pair in pairs}


def test_strict_wants_all_and_else_the_share_counts():
    assert judged("Ode to joy", TWO).value == 0.0
    assert judged("Ode to joy", TWO, strict=False).value == 0.5
    assert judged("Ode to joy", TWO).detail == f"failed: {TITLE}"


def test_reasoning_is_not_part_of_the_response():
    assert judged("<think>well, well</think><<Ode>>", TWO).value == 1.0


def test_a_blank_response_follows_nothing(subtests):
    for text in ("", " \n", "\u200b", "<think>no comma here"):
        with subtests.test(text):
            assert judged(text, [{"id": NO_COMMA}]).value == 0.0


BAD_CELLS = (
    *(None, 7, "", "x", [], {}, [3], "[" * 10_000, {"instruction_id_list": [NO_COMMA], "kwargs": []}),
    *({"instruction_id_list": [NO_COMMA], "kwargs": [3]}, [{"id": "no:such"}], [{"id": None}]),
    *([{"id": NO_COMMA, "commas": 0}], [{"id": "keywords:existence"}], [{"id": "keywords:existence", "keywords": []}]),
    *([{"id": "keywords:existence", "keywords": "sun"}], [{"id": "keywords:existence", "keywords": ["\u200b"]}]),
    [{"id": "keywords:frequency", "keyword": "a", "frequency": 1.5, "relation": "at least"}],
    [{"id": "keywords:frequency", "keyword": "a", "frequency": True, "relation": "at least"}],
    [{"id": "keywords:frequency", "keyword": "a", "frequency": 2, "relation": "nearly"}],
    *("__import__('os').system('true')", "[" * 200 + "'" + "]" * 200, "('a',", [[]], [3.5]),
    *({"func_name": "os.system"}, {"func_name": ["x"]}, {"func_name": "validate_title", "N": 3}),
    [{"id": "keywords:letter_frequency", "letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
    [{"id": "length_constraints:number_paragraphs", "num_paragraphs": 0}],
    *([{"id": "startend:end_checker", "end_phrase": '"'}], [{"id": "language:response_language", "language": "xx"}]),
    [{"id": NO_COMMA}] * 65,
)


def test_a_bad_row_has_no_value(subtests):
    for cell in BAD_CELLS:
        with subtests.test(cell=cell):
            verdict = judged("sun", cell)
            assert (verdict.value, verdict.status) == (None, "gold_invalid")


def test_whole_numbers_may_come_as_floats():
    assert judged(
        "a a", [{"id": "keywords:frequency", "keyword": "a", "frequency": 2.0, "relation": "at least"}]
    ).value


UNITS = [
    *(".", "*", "* ", "-", "<<", "[", "[a", "a.", '."'),
    *("1. ", "\n ", "```json\n", "{", "p.", "#1", "*a ", "\u0301", "*a*\n"),
]


SIZE = 100_000 if os.environ.get("TRL_EXT_THOROUGH") else 25_000


@pytest.mark.slow
def test_hostile_texts_are_judged_within_a_second(subtests):
    for text in (*(unit * (SIZE // len(unit)) for unit in UNITS), "- " + " " * SIZE, "." * SIZE + "x"):
        with subtests.test(text[:9]):
            assert timed(lambda text=text: judged(text, ALL, strict=False))[1] < 1.0


def test_a_text_beyond_the_limit_is_not_read():
    assert judged("a " * 200_000, ALL).status == "too_long"


PIECES = [
    *("*", "**", "***", "******", "<<", ">>", "[", "]", '"', "\n"),
    *("\n\n", "P.P.S", " so ", "Any more?", "Say it", "# 1", "```", ".", "A", "中"),
]
TEXTS = st.text(st.characters(exclude_categories=())) | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@pytest.mark.slow
@given(text=TEXTS)
def test_any_completion_gets_a_share(text):
    verdict = judged(text, ALL, strict=False)
    assert verdict.value is not None and 0.0 <= verdict.value <= 1.0
    assert judged(text, ALL).value == float(verdict.value == 1.0)
