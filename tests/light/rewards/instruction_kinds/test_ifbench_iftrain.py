"""Each instruction of IFBench and of IFTrain: a text that follows it and one that only looks as if."""

from typing import Any

import pytest

from trl_ext.rewards.instruction_kinds.splitting import sentences
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.instructions import KNOWN, Instructions

REQUEST = "Name \uff42oth towns, and why."
TABLE = "ID,Country,City,Year,Count\n" + "\n".join(f'{i},"A, B",C,2000,1' for i in range(7))
PRODUCTS = 'ProductID,Category,Brand,Price,Stock\n1,"a&b",C,2.5,1\n' + "\n".join(f"{i},a,b,c,d" for i in range(13))
GRADES = "\n".join(["\t".join(f'"{name}"' for name in "StudentID Subject Grade Semester Score".split())] * 1) + (
    '\n"1"\t"a"\t"b"\t"c"\t"d"' * 3
)
QUESTIONS = "\n\n".join(
    f"Question {i}: Who {'really ' * i}?\n" + "\n".join(f"{x}) Z" for x in "ABCDE") for i in range(4)
)
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, "
    "Bern, Ljubljana, Zagreb"
)
COUNTRIES = "\n".join(
    ["Zimbabwe", "Zambia", *(f"T{chr(122 - i)}" for i in range(26)), *(f"S{chr(122 - i)}" for i in range(26))]
)
KEYS = {f"keyword{i}": word for i, word in enumerate("sun moon star rain wind".split(), 1)}
ALPHABET = " ".join(f"{chr(65 + i)}nd so it goes." for i in range(26))

# id, arguments, a text that follows, a text that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
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
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    ("custom:mcq_count_length", {}, QUESTIONS, "Sure! " + QUESTIONS),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.replace("Zambia", "Algeria")),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle."),
    ("custom:character_reverse", {}, "elgae dlab ehT", "The bald eagle"),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET[12:]),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
    ("custom:csv_city", {}, TABLE, TABLE + "\n1,2,3,4,5"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace("&", "")),
    ("custom:csv_quotes", {}, GRADES, GRADES.replace('"1"', "1")),
    ("custom:date_format_list", {}, "1796-04-12, 1805-12-02", "1796-04-31"),
    ("repeat:repeat_change", {"prompt_to_repeat": REQUEST}, "List both towns, and why.", "Name both towns, and why."),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Only output this."),
    ("repeat:repeat_span", {"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 8}, "both", "both towns"),
    # IFTrain
    ("count:lowercase_counting", {"N": 1}, "NO one IS HERE", "no one is here"),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, "a1 b", "abc"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": "at least"}, "Anna", "bad"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 2}, "I go.\n***\nI see.\n***\nI win.", "I go. *** I see."),
    ("count:count_unique", {}, "no word comes again", "No word, no."),
    ("count:count_increment_word", {"keyword1": "sun", "keyword2": "moon"}, "Sun, moon, moon", "sun moon"),
    ("keywords:palindrome", {}, "at noon", "at night, I"),
    ("keywords:no_adjacent_consecutive", {}, "a dog", "a big dog"),
    ("keywords:keyword_specific_position", {"keyword": ["sun"], "n": 1, "m": 2}, "The sun.", "Sun."),
    ("keywords:start_end", {}, "So it is so", "So it is so."),
    ("keywords:word_once", {"keyword": "sun"}, "The sun", "Sun and sunny"),
    ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a A", "a b"),
    ("keywords:exclude_word_harder", {"keyword": "sun"}, "sunny", "The sun."),
    ("punctuation:punctuation_dot", {}, "No stop!", "Stop."),
    ("punctuation:punctuation_exclamation", {}, "Stop.", "Stop\uff01"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a ***"),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a\nb"),
    ("first_word:first_word_sent", {"first_word": ["so"]}, "So I came. So I saw.", "So I came. I saw."),
    ("first_word:first_word_answer", {"first_word": "so"}, "So, I came.", "I came so."),
    ("last_word:last_word_sent", {"last_word": "so"}, "I say so. Is it so?", "I say so. It is."),
    ("last_word:last_word_answer", {"last_word": "so"}, "I say so!", "So I say."),
    ("detectable_format:sentence_hyphens", {}, "I came.-I saw.", "I came. I saw."),
    ("detectable_format:square_brackets", {}, "[I] [came]", "[I] came"),
    ("detectable_format:bigram_wrapping", {}, "<<I came>> <<I saw>>", "<<I>> <<came>>"),
    ("copy:copy", {"prompt_to_repeat": REQUEST}, "name both  towns, and why.", "Sure: Name both towns, and why."),
    ("copy:copying_simple", {"prompt_to_repeat": REQUEST}, REQUEST, "Both towns"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Go.", "N": 2}, "Go.\n******\nGo.", "Go."),
    ("new:copy_span_idx", {"prompt_to_repeat": REQUEST, "n_start": 5, "n_end": 9}, "both", "bot"),
    (
        "copy:repeat_phrase",
        {"phrase": "the early bird", "small_n": 2},
        "The late bird, the old bird",
        "The early bird",
    ),
]


def judged(name: str, text: str, arguments: dict[str, Any]) -> tuple[float | None, str]:
    verdict = Instructions().score(Row(None, text, None, {"instructions": [{"id": name, **arguments}]}))
    return verdict.value, verdict.detail


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_an_instruction_is_followed_or_not(name, arguments, right, wrong):
    assert judged(name, right, arguments) == (1.0, "all followed")
    assert judged(name, wrong, arguments) == (0.0, f"failed: {name}")


def test_each_id_of_ifbench_and_iftrain_has_a_case():
    # 25 of IFEval, 58 of IFBench (arXiv:2507.02833), 29 that IFTrain adds in allenai/open-instruct (IFEvalG).
    assert len(KNOWN) == 25 + 58 + 29
    assert len({case[0] for case in CASES}) == 58 + 29


@pytest.mark.parametrize("missing", ["syllapy", "lemminflect"])
def test_a_missing_package_leaves_the_row_without_a_value(monkeypatch, missing):
    from trl_ext.rewards.instruction_kinds import word_order

    monkeypatch.setattr(word_order, "find_spec", lambda name: None)
    name = {"syllapy": "words:odd_even_syllables", "lemminflect": "words:start_verb"}[missing]
    with pytest.raises(ValueError, match=rf"{missing}.*trl-ext\[ifbench\]"):
        KNOWN[name].read({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Ada paid $3.50. Why? She had to", ["Dr. Ada paid $3.50.", "Why?", "She had to"]),
        ("1. Go.\n2. Stop.", ["1. Go.", "2. Stop."]),
        ('He said "no." Then he left', ['He said "no."', "Then he left"]),
        ("e.g. this", ["e.g. this"]),
        ("", []),
    ],
)
def test_sentences_are_split(text, expected):
    assert list(sentences(text)) == expected
