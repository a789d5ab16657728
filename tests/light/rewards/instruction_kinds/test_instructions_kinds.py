"""Each kind of instruction: texts that follow it and texts that only look as if."""

from typing import Any

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.instruction_kinds.ifeval import count_sentences, count_words
from trl_ext.rewards.instruction_kinds.instructions import KNOWN, Instructions
from trl_ext.rewards.instruction_kinds.splitting import sentences

LEAST = "at least"
SO_ZH = "今天天气很好\uff0c我们去公园散步吧。"
REQUEST = "Name \uff42oth towns, and why."
SECTIONS = {"section_spliter": "SECTION", "num_sections": 2}
SECOND = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}

# id, arguments, texts that follow, texts that do not
Case = tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]
IFEVAL: list[Case] = [
    (
        "keywords:existence",
        {"keywords": ["sun", "Moon"]},
        ("Sun and MOON", "sunny moonlight", "s\u200bun moon", "\uff53\uff55\uff4e moon"),
        ("sun",),
    ),
    ("keywords:frequency", {"keyword": "sun", "frequency": 3, "relation": LEAST}, ("Sun sunny SUN",), ("Sun sun",)),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 3, "relation": "at most"},
        ("Sun sunny SUN",),
        ("sun " * 4,),
    ),
    ("keywords:frequency", {"keyword": "sun", "frequency": 3, "relation": "less than"}, ("Sun",), ("Sun sunny SUN",)),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat"]},
        ("a cathedral", "concatenate"),
        ("My CAT.", "c\u200bat", "a _cat_", "\uff43\uff41\uff54"),
    ),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": LEAST}, ("Aa!",), ("Ab!",)),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": LEAST},
        ("NASA and the EU", "I am A", "I'm AB"),
        ("Nasa EU", "WELL-KNOWN", "U.S. x"),
    ),
    ("change_case:english_capital", {}, ("IT IS 4.",), ("it is 4.", "It is.", "4.", "中文中文A")),
    ("change_case:english_lowercase", {}, ("it is 4.",), ("IT IS 4.", "It is.", "4.", "中文中文A")),
    (
        "punctuation:no_comma",
        {},
        ("Yes. No; maybe",),
        ("Yes, no", "Yes\uff0c no", "Yes\u3001 no", "Yes\u060c no", "Yes\ufe50 no"),
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": LEAST}, ("a b c",), ("a b",)),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ("a b",), ("a b c",)),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at most"},
        ("A b. C d.",),
        ("I go. You go. We go.",),
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ("a\n***\nb", "a *** b", "***\na\n***\nb\n***"),
        ("a\n***\n***\nb", "a\n\nb"),
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        SECOND,
        ("a\n\nSo it is", "a\n\n\n\n**So,** it is"),
        ("a\n \nSomehow", "a\nSo", "a\n\nSo\n\nc"),
    ),
    # A paragraph beyond the last starts with nothing.
    ("length_constraints:nth_paragraph_first_word", SECOND | {"num_paragraphs": 1}, (), ("so",)),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ("Dear all\n\nP.P.S. Bring cake", "Dear all\n**p. p. s** Bring cake"),
        ("Dear all P.P.S. Bring cake", "Dear all\nP.P.S.", "Dear all\nP.S. Bring cake"),
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ("[name], [street]",), ("[name] []", "[[a]]")),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        ("Say it.\n\nIt.", "SAY  it. It."),
        ("Say it.", "Sure! Say it. It."),
    ),
    (
        "combination:two_responses",
        {},
        ("a\n******\nb", "******\na\n******\nb"),
        ("a\n******\na", "a\n***\nb", "a******"),
    ),
    ("startend:end_checker", {"end_phrase": "Any more?"}, ("Yes. Any more?", '"Yes. any MORE?"'), ("Any more? No.",)),
    ("startend:quotation", {}, ('"Yes."', "\u201cYes.\u201d"), ('"', '""', '"Yes', "\u201cYes.\u201c")),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ("* a\n- b", "List:\n  * a\n  + b"),
        ("* a\n* b\n* c", "* a\n*b*", "* a\n---", "* a\n* "),
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ("*a b* and **c**", "***a*** *b*"),
        ("*a* and * b *", "2 * 3 * 4 * 5", "*a\nb* *c*", "** ** **"),
    ),
    (
        "detectable_format:multiple_sections",
        SECTIONS,
        ("SECTION 1\na\nSECTION 2\nb", "## SECTION I: a\n**SECTION II** b"),
        ("SECTION 1\nSECTION 2", "As SECTION 1 and SECTION 2 say", "Section 1\na\nSection 2\nb"),
    ),
    (
        "detectable_format:json_format",
        {},
        ('{"a": 1}', "```json\n[1]\n```", "```\n{}\n```"),
        ('"a"', '{"a": NaN}', "Here: {}", "[" * 1000 + "]" * 1000),
    ),
    ("detectable_format:title", {}, ("<<Ode>>\nx",), ("<< >>", "<<a\nb>>", "<a>")),
    (
        "detectable_format:constrained_response",
        {},
        ("My answer is yes.", "Well, my answer is no."),
        ("My answer is yes. My answer is no.", "Yes."),
    ),
    ("language:response_language", {"language": "zh"}, (SO_ZH,), ("The weather is fine today.",)),
]
# id, arguments, a text that follows, a text that does not. The bad ones of some pass the published tests.
SUN = {"keyword": "sun"}
SO = {"first_word": "so"}, {"last_word": "so"}
IFTRAIN: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:word_once", SUN, "A sunny day", "Sun, sun"),
    ("keywords:word_count_different_numbers", SUN | {"frequency": 2.0, "relation": LEAST}, "Sun sunny", "sun sun sun"),
    ("keywords:word_count_different_numbers", SUN | {"frequency": 2, "relation": "less than"}, "Sun sunny", "sun"),
    ("keywords:exclude_word_harder", SUN, "A sunny day", "So the Sun, too"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": LEAST}, "Aa!", "Ab!"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
    ("paragraphs:paragraphs2", {}, "a\n\nb\nc", "a\n\nb\n\nc"),
    ("first_word:first_word_sent", SO[0], "So it is. So, go!", "So it is. Go!"),
    ("first_word:first_word_answer", SO[0], "**So** it is. Go!", "Somehow it is."),
    ("last_word:last_word_sent", SO[1], "It is so. Is it so?", "It is so. Is it?"),
    ("last_word:last_word_answer", {"last_word": ["so"]}, "Is it? It is so!", "It is so, yes."),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>\n<<now>>", "<<I am>> at home"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>>", "home"),
    ("detectable_format:square_brackets", {}, "[I] [am.]", "[I] [am] home"),
    ("detectable_format:sentence_hyphens", {}, "I am in.-You are well-known!-So.", "I am in. You are."),
    ("detectable_format:sentence_hyphens", {}, "Go.-Stop.", "Go.- Stop."),
    (
        "copy:copying_simple",
        {"prompt_to_repeat": REQUEST},
        "name both towns, and why.",
        "Name both towns, and why. Ok",
    ),
    ("copy:copy", {"prompt_to_repeat": REQUEST}, "name both towns, and why.", "Both towns"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Say it", "N": 2}, "Say it\n******\nsay it", "Say it"),
    ("new:copy_span_idx", {"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 8}, "both", "both towns"),
    ("new:copy_span_idx", {"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 9}, "both", "bot"),
    ("copy:repeat_phrase", {"phrase": "So it was.", "small_n": 2}, "So is was, so he was", "So it was, so he was"),
    ("punctuation:punctuation_dot", {}, "Yes!", "Yes..."),
    ("punctuation:punctuation_exclamation", {}, "Yes.", "Yes\uff01"),
    ("count:lowercase_counting", {"N": 2}, "You Two see this", "You all see this"),
    ("letters:letter_counting", {"N": 4, "relation": "less than"}, "a, b, c 1234", "a b c d"),
    ("count:count_unique", {}, "One, two, three, four.", "One and one"),
    ("count:count_increment_word", {"keyword1": "sun", "keyword2": "moon"}, "Moon, sun, moons", "sun moon"),
    ("count:counting_composition", {"n_sent": 2, "n_words": 2}, "***".join(["I go. You go."] * 3), "I go.***" * 3),
    ("count:counting_composition", {"n_sent": 1, "n_words": 2}, "I go.\n* * *\nGo on.\n* * *\nSo on.", "I go."),
    ("keywords:palindrome", {}, "At Noon.", "I had a cat"),
    ("keywords:keyword_specific_position", SUN | {"n": 2, "m": 3}, "No. See the Sun!", "See the sun. No."),
    ("keywords:start_end", {}, "So it is so", "So it is so."),
    ("keywords:no_adjacent_consecutive", {}, "a cat bit", "a big cat"),
]
OTHERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("validate_choice", {"options": ["yes", "no"]}, "**Yes.**", "Yes no"),
    ("validate_choice", {"options": "(yes/no/maybe)"}, "maybe", "Maybe yes."),
]
CASES = [*IFEVAL, *((name, given, (right,), (wrong,)) for name, given, right, wrong in IFTRAIN + OTHERS)]


def judged(name: str, text: str, arguments: dict[str, Any]) -> tuple[float | None, str]:
    verdict = Instructions().score(Row(None, text, None, {"instructions": [{"id": name, **arguments}]}))
    return verdict.value, verdict.detail


@pytest.mark.slow
def test_an_instruction_is_followed_or_not(subtests):
    for name, arguments, right, wrong in CASES:
        for text in right:
            with subtests.test(name, text=text):
                assert judged(name, text, arguments) == (1.0, "all followed")
        for text in wrong:
            with subtests.test(name, text=text):
                assert judged(name, text, arguments) == (0.0, f"failed: {name}")


def test_each_id_of_ifeval_and_iftrain_has_a_case():
    # 25 of IFEval (arXiv:2311.07911) and 29 that arXiv:2507.02833 trains on; IFBench's are its test set.
    assert len({name for name, *_ in IFEVAL}) == 25 and len({name for name, *_ in IFTRAIN}) == 29
    assert {name for name, *_ in CASES} == set(KNOWN)


def test_a_phrase_without_a_middle_is_no_phrase():
    with pytest.raises(ValueError, match="three words"):
        KNOWN["copy:repeat_phrase"].read({"phrase": "so what", "small_n": 2})


def test_words_are_runs_of_letters_and_digits(subtests):
    for text, num_words in {
        "I don't - do you?": 5,
        "well-known": 2,
        "3.5": 2,
        "做数学 now": 4,
        "...": 0,
        "": 0,
    }.items():
        with subtests.test(text):
            assert count_words(text) == num_words


NUM_SENTENCES = {
    "One. Two! Three?": 3,
    "Dr. Ada met J. Smith. They talked.": 2,
    "It costs $3.50. Really?!": 2,
    '"Why?" he asked. "So."': 3,
    "Fruits, e.g. apples, are good.": 1,
    "1. First\n2. Second": 1,
    "A heading\n\nA sentence.": 2,
    "no end": 1,
    "it is. so it is.": 2,
    "她来了。他走了\uff01": 2,
    "Wait... What?": 2,
    "***\n\n---": 0,
    ". . . .": 0,
}


def test_sentences_end_where_a_reader_ends_them(subtests):
    for text, num_sentences in NUM_SENTENCES.items():
        with subtests.test(text):
            assert count_sentences(text) == num_sentences


def test_sentences_are_split():
    assert sentences("Dr. Ada paid $3.50. Why? She had to") == ("Dr. Ada paid $3.50.", "Why?", "She had to")
    assert sentences("1. Go.\n2. Stop.") == ("1. Go.", "2. Stop.")
    assert sentences('He said "no." Then he left') == ('He said "no."', "Then he left")
    assert sentences("e.g. this") == ("e.g. this",) and sentences("") == ()
