"""Each kind of instruction: what follows it, and what only looks as if."""

from typing import Any

import pytest

from trl_ext.rewards.instruction_kinds.length import count_sentences, count_words
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.instructions import Instructions


def follows(name: str, text: str, **arguments: Any) -> bool:
    return Instructions().score(Row(None, text, None, {"instructions": [{"id": name, **arguments}]})).value == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sun and MOON", True),
        ("sunny moonlight", True),
        ("sun", False),
        ("s\u200bun moon", True),
        ("\uff53\uff55\uff4e moon", True),
    ],
)
def test_all_keywords_occur(text, expected):
    assert follows("keywords:existence", text, keywords=["sun", "Moon"]) is expected


@pytest.mark.parametrize(("relation", "expected"), [("at least", True), ("at most", True), ("less than", False)])
def test_a_keyword_is_counted(relation, expected):
    assert follows("keywords:frequency", "Sun sunny SUN", keyword="sun", frequency=3, relation=relation) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cathedral", True),
        ("My CAT.", False),
        ("c\u200bat", False),
        ("a _cat_", False),
        ("\uff43\uff41\uff54", False),
        ("concatenate", True),
    ],
)
def test_forbidden_words_are_whole_words_however_they_are_written(text, expected):
    assert follows("keywords:forbidden_words", text, forbidden_words=["cat"]) is expected


@pytest.mark.parametrize(("text", "expected"), [("Aa!", True), ("Ab!", False)])
def test_letters_are_counted_in_both_cases(text, expected):
    assert follows("keywords:letter_frequency", text, letter="a", let_frequency=2, let_relation="at least") is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NASA and the EU", True),
        ("I am A", True),
        ("I'm AB", True),
        ("Nasa EU", False),
        ("WELL-KNOWN", False),
        ("U.S. x", False),
    ],
)
def test_words_of_capitals_are_counted(text, expected):
    arguments = {"capital_frequency": 2, "capital_relation": "at least"}
    assert follows("change_case:capital_word_frequency", text, **arguments) is expected


@pytest.mark.parametrize(
    ("text", "upper", "lower"),
    [
        ("IT IS 4.", True, False),
        ("it is 4.", False, True),
        ("It is.", False, False),
        ("4.", False, False),
        ("中文中文A", False, False),
    ],
)
def test_case_needs_letters_that_can_be_english(text, upper, lower):
    assert follows("change_case:english_capital", text) is upper
    assert follows("change_case:english_lowercase", text) is lower


@pytest.mark.parametrize("comma", [",", "\uff0c", "\u3001", "\u060c", "\ufe50"])
def test_no_comma_of_any_script(comma):
    assert follows("punctuation:no_comma", "Yes. No; maybe")
    assert not follows("punctuation:no_comma", f"Yes{comma} no")


@pytest.mark.parametrize(
    ("text", "num_words"),
    [("I don't - do you?", 5), ("well-known", 2), ("3.5", 2), ("做数学 now", 4), ("...", 0), ("", 0)],
)
def test_words_are_runs_of_letters_and_digits(text, num_words):
    assert count_words(text) == num_words


@pytest.mark.parametrize(
    ("text", "num_sentences"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Ada met J. Smith. They talked.", 2),
        ("It costs $3.50. Really?!", 2),
        ('"Why?" he asked. "So."', 3),
        ("Fruits, e.g. apples, are good.", 1),
        ("1. First\n2. Second", 1),
        ("A heading\n\nA sentence.", 2),
        ("no end", 1),
        ("it is. so it is.", 2),
        ("她来了。他走了\uff01", 2),
        ("Wait... What?", 2),
        ("***\n\n---", 0),
        (". . . .", 0),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, num_sentences):
    assert count_sentences(text) == num_sentences


def test_words_and_sentences_stand_in_relation_to_a_number():
    assert follows("length_constraints:number_words", "a b c", num_words=3, relation="at least")
    assert not follows("length_constraints:number_words", "a b c", num_words=3, relation="less than")
    assert follows("length_constraints:number_sentences", "A b. C d.", num_sentences=2, relation="at most")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n***\nb", True),
        ("a *** b", True),
        ("***\na\n***\nb\n***", True),
        ("a\n***\n***\nb", False),
        ("a\n\nb", False),
    ],
)
def test_asterisks_divide_paragraphs(text, expected):
    assert follows("length_constraints:number_paragraphs", text, num_paragraphs=2) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\nSo it is", True),
        ("a\n\n\n\n**So,** it is", True),
        ("a\n \nSomehow", False),
        ("a\nSo", False),
        ("a\n\nSo\n\nc", False),
    ],
)
def test_the_nth_paragraph_starts_with_the_word(text, expected):
    arguments = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}
    assert follows("length_constraints:nth_paragraph_first_word", text, **arguments) is expected


def test_a_paragraph_beyond_the_last_starts_with_nothing():
    arguments = {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}
    assert not follows("length_constraints:nth_paragraph_first_word", "a", **arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dear all\n\nP.P.S. Bring cake", True),
        ("Dear all\n**p. p. s** Bring cake", True),
        ("Dear all P.P.S. Bring cake", False),
        ("Dear all\nP.P.S.", False),
        ("Dear all\nP.S. Bring cake", False),
    ],
)
def test_a_postscript_starts_a_line_and_says_something(text, expected):
    assert follows("detectable_content:postscript", text, postscript_marker="P.P.S") is expected


@pytest.mark.parametrize(("text", "expected"), [("[name], [street]", True), ("[name] []", False), ("[[a]]", False)])
def test_placeholders_stand_in_square_brackets(text, expected):
    assert follows("detectable_content:number_placeholders", text, num_placeholders=2) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Say it.\n\nIt.", True), ("SAY  it. It.", True), ("Say it.", False), ("Sure! Say it. It.", False)],
)
def test_the_prompt_is_repeated_and_then_answered(text, expected):
    assert follows("combination:repeat_prompt", text, prompt_to_repeat="Say it.") is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n******\nb", True),
        ("******\na\n******\nb", True),
        ("a\n******\na", False),
        ("a\n***\nb", False),
        ("a******", False),
    ],
)
def test_two_responses_differ(text, expected):
    assert follows("combination:two_responses", text) is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("Yes. Any more?", True), ('"Yes. any MORE?"', True), ("Any more? No.", False)]
)
def test_the_phrase_ends_the_response(text, expected):
    assert follows("startend:end_checker", text, end_phrase="Any more?") is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"Yes."', True),
        ("\u201cYes.\u201d", True),
        ('"', False),
        ('""', False),
        ('"Yes', False),
        ("\u201cYes.\u201c", False),
    ],
)
def test_quotation_marks_wrap_the_response(text, expected):
    assert follows("startend:quotation", text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* a\n- b", True),
        ("List:\n  * a\n  + b", True),
        ("* a\n* b\n* c", False),
        ("* a\n*b*", False),
        ("* a\n---", False),
        ("* a\n* ", False),
    ],
)
def test_bullets_are_exactly_so_many(text, expected):
    assert follows("detectable_format:number_bullet_lists", text, num_bullets=2) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*a b* and **c**", True),
        ("***a*** *b*", True),
        ("*a* and * b *", False),
        ("2 * 3 * 4 * 5", False),
        ("*a\nb* *c*", False),
        ("** ** **", False),
    ],
)
def test_highlights_stand_between_asterisks(text, expected):
    assert follows("detectable_format:number_highlighted_sections", text, num_highlights=2) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SECTION 1\na\nSECTION 2\nb", True),
        ("## SECTION I: a\n**SECTION II** b", True),
        ("SECTION 1\nSECTION 2", False),
        ("As SECTION 1 and SECTION 2 say", False),
        ("Section 1\na\nSection 2\nb", False),
    ],
)
def test_sections_have_a_numbered_line_and_a_text(text, expected):
    assert follows("detectable_format:multiple_sections", text, section_spliter="SECTION", num_sections=2) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', True),
        ("```json\n[1]\n```", True),
        ("```\n{}\n```", True),
        ('"a"', False),
        ('{"a": NaN}', False),
        ("Here: {}", False),
        ("[" * 1000 + "]" * 1000, False),
    ],
)
def test_the_whole_response_is_json(text, expected):
    assert follows("detectable_format:json_format", text) is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("<<Ode>>\nx", True), ("<< >>", False), ("<<a\nb>>", False), ("<a>", False)]
)
def test_a_title_stands_between_double_angles(text, expected):
    assert follows("detectable_format:title", text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("My answer is yes.", True),
        ("Well, my answer is no.", True),
        ("My answer is yes. My answer is no.", False),
        ("Yes.", False),
    ],
)
def test_one_of_the_options_is_chosen(text, expected):
    assert follows("detectable_format:constrained_response", text) is expected


def test_the_language_is_judged_by_its_rule():
    assert follows("language:response_language", "今天天气很好\uff0c我们去公园散步吧。", language="zh")
    assert not follows("language:response_language", "The weather is fine today.", language="zh")
