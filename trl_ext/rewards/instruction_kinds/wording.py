"""Test instructions about words and letters: keywords, case, commas."""

import re

from trl_ext.rewards.instruction_kinds.spec import Bound, count, instruction, letter, relation, text, texts
from trl_ext.rewards.text.prose import count_word, unmarked

# "WELL-KNOWN" and "U.S." are one word each, "I'm" is two: its "I" is a word of capitals.
_WORD = re.compile(r"\w++(?>(?:[.-]\w++)*)")


@instruction("keywords:existence", keywords=texts)
def has_keywords(response: str, keywords: tuple[str, ...]) -> bool:
    """True when all keywords occur, in any case and inside longer words too: "tornado" is in "tornadoes"."""
    folded = response.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


@instruction("keywords:frequency", keyword=text, frequency=count, relation=relation)
def has_keyword_often(response: str, keyword: str, frequency: int, relation: Bound) -> bool:
    """True when the keyword, in any case and inside longer words too, occurs as often as the relation asks."""
    return relation.holds(response.casefold().count(keyword.casefold()), frequency)


@instruction("keywords:forbidden_words", forbidden_words=texts)
def lacks_words(response: str, forbidden_words: tuple[str, ...]) -> bool:
    """True when no forbidden word occurs as a word of its own, in any case: "cat" may be in "cathedral"."""
    folded = unmarked(response.casefold())
    return not any(count_word(folded, word.casefold()) for word in forbidden_words)


@instruction("keywords:letter_frequency", letter=letter, let_frequency=count, let_relation=relation)
def has_letter_often(response: str, letter: str, let_frequency: int, let_relation: Bound) -> bool:
    """True when the letter, capital or small, occurs as often as the relation asks."""
    return let_relation.holds(response.casefold().count(letter.casefold()), let_frequency)


@instruction("change_case:capital_word_frequency", capital_frequency=count, capital_relation=relation)
def has_capital_words(response: str, capital_frequency: int, capital_relation: Bound) -> bool:
    """True when there are as many words without a small letter ("I" is one) as the relation asks."""
    num_words = sum(match.group().isupper() for match in _WORD.finditer(response))
    return capital_relation.holds(num_words, capital_frequency)


@instruction("change_case:english_capital")
def is_upper(response: str) -> bool:
    """True when there are capitals, no small letter, and most letters are A to Z, so that it can be English."""
    return response.isupper() and _mostly_latin(response)


@instruction("change_case:english_lowercase")
def is_lower(response: str) -> bool:
    """True when there are small letters, no capital, and most letters are a to z, so that it can be English."""
    return response.islower() and _mostly_latin(response)


@instruction("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    """True without a comma, the Arabic and Chinese ones and the low quotation mark included."""
    return not any(comma in response for comma in ",\u060c\u3001\u201a")


def _mostly_latin(response: str) -> bool:
    letters = [char for char in response if char.isalpha()]
    return 2 * sum(map(str.isascii, letters)) > len(letters)
