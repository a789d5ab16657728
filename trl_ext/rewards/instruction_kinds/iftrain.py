"""Test IFTrain's 29 kinds of instructions: copies, first and last words, keywords at places, counts, wrappings.

They are defined in arXiv:2507.02833 (appendix, "IFTrain") and in the prompts of `allenai/IF_multi_constraints_upto5`.
docs/reference/instructions.md lists differences from the published tests. Case and marks around words do not count; a
keyword also counts inside longer words.
"""

import re
from itertools import pairwise

from trl_ext.rewards.instruction_kinds.ifeval import BLANK_LINES, has_letter_often, lacks_words
from trl_ext.rewards.instruction_kinds.spec import (
    count,
    divided,
    instruction,
    positive,
    raw_text,
    relation,
    sentences,
    stripped_words,
    text,
    word,
)
from trl_ext.rewards.text.prose import normalized

_BIGRAMS = re.compile(r"\s*+(?:<<[^\s<>]++[ \t]++[^\s<>]++>>\s*+)*(?:<<[^\s<>]++>>)?\s*+")
_JOINT = re.compile(r"(?<=[.!?])-(?=\S)")


def _fold(text: str) -> str:
    """Return a text without differences of case and spacing, normalised as the response is."""
    return " ".join(normalized(text).casefold().split())


def _words(text: str) -> list[str]:
    return stripped_words(text.casefold())


def _often(response: str, keyword: str) -> int:
    return response.casefold().count(keyword.casefold())


def phrase(value: object) -> tuple[str, ...]:
    """Read a phrase of at least three words, as words."""
    found = tuple(_words(text(value)))
    if len(found) < 3:
        raise ValueError("a phrase of three words or more")
    return found


once = instruction("keywords:word_once", keyword=text)(lambda response, keyword: _often(response, keyword) == 1)
# Exactly this number: the prompt names the number, but never the row's relation.
exactly = instruction("keywords:word_count_different_numbers", keyword=text, frequency=count, relation=relation)(
    lambda response, keyword, frequency, relation: _often(response, keyword) == frequency
)
once_and_twice = instruction("count:count_increment_word", keyword1=text, keyword2=text)(
    lambda response, keyword1, keyword2: (_often(response, keyword1), _often(response, keyword2)) == (1, 2)
)
# As a whole word.
lacks_keyword = instruction("keywords:exclude_word_harder", keyword=text)(
    lambda response, keyword: lacks_words.follows(response, (keyword,))
)
letter_counting = instruction("letters:letter_counting2", **has_letter_often.arguments)(has_letter_often.follows)
letters = instruction("letters:letter_counting", N=count, relation=relation)(
    lambda response, N, relation: relation(sum(map(str.isalpha, response)), N)
)
# Words without a capital.
few_small_words = instruction("count:lowercase_counting", N=count)(
    lambda response, N: sum(map(str.islower, stripped_words(response))) <= N
)
unique = instruction("count:count_unique")(lambda response: len(set(found := _words(response))) == len(found))
no_dot = instruction("punctuation:punctuation_dot")(lambda response: not {".", "\u3002"} & set(response))
no_exclamation = instruction("punctuation:punctuation_exclamation")(lambda response: "!" not in response)
# Neither of the two parts is blank.
two_parts = instruction("paragraphs:paragraphs")(
    lambda response: len(parts := divided(response, "***")) == 2 and all(parts)
)
two_paragraphs = instruction("paragraphs:paragraphs2")(lambda response: len(BLANK_LINES.split(response.strip())) == 2)
first_of_sentences = instruction("first_word:first_word_sent", first_word=word)(
    lambda response, first_word: all(_words(one)[:1] == [first_word.casefold()] for one in sentences(response))
)
first_of_all = instruction("first_word:first_word_answer", first_word=word)(
    lambda response, first_word: _words(response)[:1] == [first_word.casefold()]
)
last_of_sentences = instruction("last_word:last_word_sent", last_word=word)(
    lambda response, last_word: all(_words(one)[-1:] == [last_word.casefold()] for one in sentences(response))
)
last_of_all = instruction("last_word:last_word_answer", last_word=word)(
    lambda response, last_word: _words(response)[-1:] == [last_word.casefold()]
)
# In the order of the alphabet: "a big cat" breaks it twice, "a cat" does not.
no_next_initials = instruction("keywords:no_adjacent_consecutive")(
    lambda response: all(ord(two[0]) - ord(one[0]) != 1 for one, two in pairwise(_words(response)))
)
# Of three letters or more.
palindrome = instruction("keywords:palindrome")(
    lambda response: any(len(one) > 2 and one.isalpha() and one == one[::-1] for one in _words(response))
)
# Only pairs of words in `<<` and `>>`, of which the last may be one word; punctuation is inside, too.
bigrams = instruction("detectable_format:bigram_wrapping")(lambda response: _BIGRAMS.fullmatch(response) is not None)
brackets = instruction("detectable_format:square_brackets")(
    lambda response: all(len(part) > 2 and part[0] == "[" and part[-1] == "]" for part in response.split())
)
copying_simple = instruction("copy:copying_simple", prompt_to_repeat=raw_text)(
    lambda response, prompt_to_repeat: _fold(response) == _fold(prompt_to_repeat)
)
copying = instruction("copy:copy", prompt_to_repeat=raw_text)(copying_simple.follows)
copying_multiple = instruction("copy:copying_multiple", prompt_to_repeat=raw_text, N=positive)(
    lambda response, prompt_to_repeat, N: (
        [_fold(part) for part in divided(response, "******")] == [_fold(prompt_to_repeat)] * N
    )
)
# The characters from n_start to n_end, with or without the last character.
copying_span = instruction("new:copy_span_idx", prompt_to_repeat=raw_text, n_start=count, n_end=count)(
    lambda response, prompt_to_repeat, n_start, n_end: (
        _fold(response) in [_fold(prompt_to_repeat[n_start : n_end + last]) for last in (0, 1)]
    )
)


@instruction("keywords:keyword_specific_position", keyword=word, n=positive, m=positive)
def has_keyword_at(response: str, keyword: str, n: int, m: int) -> bool:
    """Return True if the m-th word of the n-th sentence is the keyword.

    Args:
        response: The completion.
        keyword: The word, in any case.
        n: Number of the sentence, from 1.
        m: Number of the word in it, from 1.
    """
    nth = sentences(response)[n - 1 : n]
    return bool(nth) and _words(nth[0])[m - 1 : m] == [keyword.casefold()]


@instruction("keywords:start_end")
def starts_as_it_ends(response: str) -> bool:
    """Return True if first and last word are the same and nothing follows the last, not even a full stop."""
    found = _words(response)
    return len(found) > 1 and found[0] == found[-1] and response.rstrip()[-1].isalnum()


@instruction("detectable_format:sentence_hyphens")
def joins_sentences(response: str) -> bool:
    """Return True if there are at least two sentences, joined by hyphens without spaces."""
    parts = _JOINT.split(response.strip())
    return len(parts) > 1 and all(len(sentences(part)) == 1 for part in parts)


@instruction("copy:repeat_phrase", phrase=phrase, small_n=positive)
def varies_phrase(response: str, phrase: tuple[str, ...], small_n: int) -> bool:
    """Return True if the phrase occurs `small_n` times with one inner word replaced, and never unchanged."""
    found, length = _words(response), len(phrase)
    windows = (found[i : i + length] for i in range(len(found) - length + 1))
    ours = (window for window in windows if (window[0], window[-1]) == (phrase[0], phrase[-1]))
    replaced = []
    for window in ours:
        replaced.append(sum(a != b for a, b in zip(window, phrase, strict=True)))
    return replaced.count(1) == small_n and 0 not in replaced


@instruction("count:counting_composition", n_sent=positive, n_words=positive)
def is_composed(response: str, n_sent: int, n_words: int) -> bool:
    """Return True for three parts between `***` or `* * *`, with this many sentences each, of this many words each."""
    parts = [sentences(part) for part in divided(response.replace("* * *", "***"), "***")]
    lengths = [len(_words(one)) for part in parts for one in part]
    return [len(part) for part in parts] == [n_sent] * 3 and set(lengths) == {n_words}
