"""Each kind of instruction: texts that follow it and texts that only look as if."""

from typing import Any

import pytest

from trl_ext.rewards.instruction_kinds import spec
from trl_ext.rewards.instruction_kinds.ifeval import count_sentences, count_words
from trl_ext.rewards.instruction_kinds.splitting import sentences
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.instructions import KNOWN, Instructions

LEAST = "at least"
SO_ZH = "今天天气很好\uff0c我们去公园散步吧。"
REQUEST = "Name \uff42oth towns, and why."
KEYS = {f"keyword{i}": word for i, word in enumerate("sun moon star rain wind".split(), 1)}
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
# id, arguments, a text that follows, a text that does not
IFBENCH: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:word_count_range", {"min_words": 3, "max_words": 4.0}, "one two three", "one two three four five"),
    ("count:unique_word_count", {"N": 3}, "Red, green, blue.", "red Red (red) green"),
    ("ratio:stop_words", {"percentage": 50}, "the cat sleeps", "the cat and the dog"),
    ("ratio:sentence_type", {}, "I came. I saw. Did I win?", "I came. I saw."),
    ("ratio:sentence_balance", {}, "I came. Did I? Yes!", "well now"),
    ("count:conjunctions", {"small_n": 2}, "He came, but late, and sang", "and And AND"),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Liams and Emma."),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 50}, "abcdxy", "zzzzzz"),
    ("count:numbers", {"N": 2}, "1,000.5 men and 3 dogs", "1 man, 2 dogs, 3 cats"),
    ("count:punctuation", {}, "Well, a: b; c. Yes! No? What?!", "Well, a: b; c. What?!"),
    ("count:words_japanese", {"N": 2}, "one \u732b three \u72ac", "one two \u732b four"),
    ("count:pronouns", {"N": 3}, "She/her likes it", "Emma likes cats"),
    ("count:keywords_multiple", KEYS, "sun" + " moon" * 2 + " star" * 3 + " rain" * 5 + " wind" * 7, "sun moon star"),
    ("words:alphabet", {}, "Yes, zebras ate bread", "A big dog"),
    ("words:vowel", {}, "all cats eat fat rats", "a quiet odd cat"),
    ("words:consonants", {}, "strong winds", "strong wine"),
    ("words:palindrome", {}, "level " * 10, "level " * 9 + "noon"),
    ("words:prime_lengths", {}, "so, the night", "four cats"),
    ("words:repeats", {"small_n": 2}, "no No yes", "no No no."),
    ("words:odd_even_syllables", {}, "dog water cat", "dog cat water"),
    ("words:start_verb", {}, "Consider the lilies.", "The lilies."),
    ("words:no_consecutive", {}, "a big cat", "a big bear"),
    ("words:keywords_specific_position", {"keyword": "sun", "n": 2, "m": 3}, "No. See the Sun!", "See the sun. No."),
    ("words:words_position", {"keyword": "so"}, "And so it went so well.", "So it went so well"),
    ("sentence:alliteration_increment", {}, "I see. A big bear. Two tall tan trees.", "A big bear. I see."),
    ("sentence:increment", {"small_n": 1}, "Go. Go on. Go on now.", "Go. Go on. Go on right now."),
    ("sentence:keyword", {"word": "sun", "N": 2}, "No. The Sun, see.", "The sun. No."),
    ("words:last_first", {}, "I like cats. Cats sleep.", "I like cats. Dogs sleep."),
    ("words:paragraph_last_first", {}, "So it is so.\n\nNo means no!", "So it is.\nNo means no."),
    ("ratio:sentence_words", {}, "Red sun. Old dog. New pan.", "Red sun. Old sun. New pan."),
    ("format:parentheses", {}, "([{([x])}])", "([{(x)}])"),
    ("format:quotes", {}, 'He said "she said \'they said "no" to it\' once".', 'He said "no" and \'yes\' and "no".'),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Maybe yes."),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "B"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know.", "know"),
    ("format:newline", {}, "one\n\ntwo", "one two"),
    ("format:emoji", {}, "I run. \U0001f600 I sleep\U0001f634.", "I run. I sleep \U0001f634."),
    ("format:line_indent", {}, "a\n  b\n\n   c", "a\n b\n b"),
    ("format:quote_unquote", {}, 'He said "no" and left.', 'He said "no".'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "- a\n- b"),
    ("format:thesis", {}, "<i>Cats rule.</i> They sleep.", "<i>Cats rule.</i>"),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "a - b"),
    ("format:no_bullets_bullets", {}, "I came. I saw.\n* a\n* b", "* a\n* b"),
    ("format:title_case", {}, "The Lord of the Rings", "The lord of the Rings"),
    (
        "format:output_template",
        {},
        "My Answer: a My Conclusion: b Future Outlook: c",
        "My Answer: My Conclusion: Future Outlook:",
    ),
    ("format:no_whitespace", {}, "a-b-c", "a b"),
    ("repeat:repeat_change", {"prompt_to_repeat": REQUEST}, "List both towns, and why.", "Name both towns, and why."),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Only output this."),
    ("repeat:repeat_span", {"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 8}, "both", "both towns"),
]
CASES = [*IFEVAL, *((name, given, (right,), (wrong,)) for name, given, right, wrong in IFBENCH)]


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


def test_each_id_of_ifeval_and_ifbench_has_a_case():
    # 25 of IFEval (arXiv:2311.07911) and, without the 11 fixed tasks, 47 of IFBench (arXiv:2507.02833).
    assert len({name for name, *_ in IFEVAL}) == 25 and len({name for name, *_ in IFBENCH}) == 47
    assert {name for name, *_ in CASES} == set(KNOWN)


@pytest.mark.parametrize("missing", ["syllapy", "lemminflect"])
def test_a_missing_package_leaves_the_row_without_a_value(monkeypatch, missing):
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    name = {"syllapy": "words:odd_even_syllables", "lemminflect": "words:start_verb"}[missing]
    with pytest.raises(ValueError, match=rf"{missing}.*trl-ext\[ifbench\]"):
        KNOWN[name].read({})


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
