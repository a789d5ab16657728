"""Test IFTrain's 29 kinds of instructions: copies, first and last words, keywords at places, counts, wrappings.

The sentences that these tests judge are those of arXiv:2507.02833 (appendix, "IFTrain") and of the prompts in
`allenai/IF_multi_constraints_upto5`. docs/reference/instructions.md says where the published tests differ.
"""

import re
from itertools import pairwise

from trl_ext.rewards.instruction_kinds.ifeval import BLANK_LINES, has_letter_often, lacks_words
from trl_ext.rewards.instruction_kinds.spec import (
    Instruction,
    Relation,
    count,
    divided,
    instruction,
    positive,
    raw_text,
    relation,
    text,
    word,
)
from trl_ext.rewards.instruction_kinds.splitting import sentences, stripped_words, word_tokens
from trl_ext.rewards.text.prose import normalized

_BIGRAMS = re.compile(r"\s*+(?:<<[^\s<>]++[ \t]++[^\s<>]++>>\s*+)*+(?:<<[^\s<>]++>>)?+\s*+")
_JOINT = re.compile(r"(?<=[.!?])-(?=\S)")
_MIN_PALINDROME, _MIN_PHRASE = 3, 3  # letters; words

letter_counting = Instruction("letters:letter_counting2", has_letter_often.follows, has_letter_often.arguments)


def _folded(text: str) -> str:
    """Return a text in any case and spacing, normalised as the response is."""
    return " ".join(normalized(text).casefold().split())


def _words(text: str) -> list[str]:
    return stripped_words(text.casefold())


def _often(response: str, keyword: str) -> int:
    return response.casefold().count(keyword.casefold())


@instruction("keywords:word_once", keyword=text)
def has_keyword_once(response: str, keyword: str) -> bool:
    """True when the keyword occurs exactly once, in any case and inside longer words too."""
    return _often(response, keyword) == 1


@instruction("keywords:word_count_different_numbers", keyword=text, frequency=count, relation=relation)
def has_keyword_exactly(response: str, keyword: str, frequency: int, relation: Relation) -> bool:
    """True when the keyword occurs exactly so often: the prompt names the number, and never the row's relation."""
    return _often(response, keyword) == frequency


@instruction("keywords:exclude_word_harder", keyword=text)
def lacks_keyword(response: str, keyword: str) -> bool:
    """True when the keyword does not occur as a word of its own, in any case."""
    return lacks_words.follows(response, (keyword,))


@instruction("count:count_increment_word", keyword1=text, keyword2=text)
def has_once_and_twice(response: str, keyword1: str, keyword2: str) -> bool:
    """True when one keyword occurs exactly once and the other exactly twice, in any case, inside longer words too."""
    return _often(response, keyword1) == 1 and _often(response, keyword2) == 2


@instruction("keywords:keyword_specific_position", keyword=word, n=positive, m=positive)
def has_keyword_at(response: str, keyword: str, n: int, m: int) -> bool:
    """True when the m-th word of the n-th sentence is the keyword, in any case."""
    nth = sentences(response)[n - 1 : n]
    return bool(nth) and [word.casefold() for word in word_tokens(nth[0])[m - 1 : m]] == [keyword.casefold()]


@instruction("keywords:no_adjacent_consecutive")
def has_no_next_initials(response: str) -> bool:
    """True when no word starts with the letter of the alphabet behind the one that starts the word before it."""
    return all(ord(right[0]) - ord(left[0]) != 1 for left, right in pairwise(_words(response)))


@instruction("keywords:palindrome")
def has_palindrome(response: str) -> bool:
    """True when a word of three letters or more reads the same backwards, in any case."""
    return any(len(word) >= _MIN_PALINDROME and word.isalpha() and word == word[::-1] for word in _words(response))


@instruction("keywords:start_end")
def starts_as_it_ends(response: str) -> bool:
    """True when first and last word are the same, in any case, and nothing follows the last, not even a full stop."""
    found = _words(response)
    return len(found) > 1 and found[0] == found[-1] and response.rstrip()[-1].isalnum()


@instruction("paragraphs:paragraphs")
def has_two_parts(response: str) -> bool:
    """True when `***` divides the response into two parts, neither of them blank."""
    parts = divided(response, "***")
    return len(parts) == 2 and all(parts)


@instruction("paragraphs:paragraphs2")
def has_two_paragraphs(response: str) -> bool:
    """True when blank lines divide the response into two paragraphs."""
    return len(BLANK_LINES.split(response.strip())) == 2


@instruction("first_word:first_word_sent", first_word=word)
def starts_sentences(response: str, first_word: str) -> bool:
    """True when each sentence starts with the word, in any case; marks around words do not count."""
    return all(_words(one)[:1] == [first_word.casefold()] for one in sentences(response))


@instruction("first_word:first_word_answer", first_word=word)
def starts_with_word(response: str, first_word: str) -> bool:
    """True when the response starts with the word, in any case."""
    return _words(response)[:1] == [first_word.casefold()]


@instruction("last_word:last_word_sent", last_word=word)
def ends_sentences(response: str, last_word: str) -> bool:
    """True when each sentence ends with the word, in any case."""
    return all(_words(one)[-1:] == [last_word.casefold()] for one in sentences(response))


@instruction("last_word:last_word_answer", last_word=word)
def ends_with_word(response: str, last_word: str) -> bool:
    """True when the response ends with the word, in any case."""
    return _words(response)[-1:] == [last_word.casefold()]


@instruction("detectable_format:bigram_wrapping")
def wraps_bigrams(response: str) -> bool:
    """True for nothing but pairs of words in `<<` and `>>`, of which the last may be one word."""
    return _BIGRAMS.fullmatch(response) is not None


@instruction("detectable_format:square_brackets")
def wraps_words(response: str) -> bool:
    """True when each word stands in square brackets, its punctuation too."""
    return all(len(part) > 2 and part[0] == "[" and part[-1] == "]" for part in response.split())


@instruction("detectable_format:sentence_hyphens")
def joins_sentences(response: str) -> bool:
    """True when a hyphen without spaces stands between each two sentences, of which there are two at least."""
    parts = _JOINT.split(response.strip())
    return len(parts) > 1 and all(len(sentences(part)) == 1 for part in parts)


@instruction("copy:copying_simple", prompt_to_repeat=raw_text)
def copies_request(response: str, prompt_to_repeat: str) -> bool:
    """True when the response is the request, in any case and spacing."""
    return _folded(response) == _folded(prompt_to_repeat)


copying = Instruction("copy:copy", copies_request.follows, copies_request.arguments)


@instruction("copy:copying_multiple", prompt_to_repeat=raw_text, N=positive)
def copies_often(response: str, prompt_to_repeat: str, N: int) -> bool:
    """True when the response is the request N times, divided by `******`."""
    return [_folded(part) for part in divided(response, "******")] == [_folded(prompt_to_repeat)] * N


@instruction("new:copy_span_idx", prompt_to_repeat=raw_text, n_start=count, n_end=count)
def copies_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True for the request's characters from n_start to n_end, with the last as the prompt asks, or without it."""
    return _folded(response) in {_folded(prompt_to_repeat[n_start : n_end + last]) for last in (0, 1)}


def phrase(value: object) -> tuple[str, ...]:
    """Read a phrase that has a word between its first and its last, as words."""
    found = tuple(_words(text(value)))
    if len(found) < _MIN_PHRASE:
        raise ValueError("a phrase of three words or more")
    return found


@instruction("copy:repeat_phrase", phrase=phrase, small_n=positive)
def varies_phrase(response: str, phrase: tuple[str, ...], small_n: int) -> bool:
    """True when the phrase occurs exactly so often with one inner word replaced, and never as it is."""
    found, length = _words(response), len(phrase)
    windows = (found[i : i + length] for i in range(len(found) - length + 1))
    ours = (window for window in windows if (window[0], window[-1]) == (phrase[0], phrase[-1]))
    replaced = [sum(a != b for a, b in zip(window, phrase, strict=True)) for window in ours]
    return replaced.count(1) == small_n and 0 not in replaced


@instruction("punctuation:punctuation_dot")
def has_no_dot(response: str) -> bool:
    """True without a full stop, the Chinese one included."""
    return "." not in response and "\u3002" not in response


@instruction("punctuation:punctuation_exclamation")
def has_no_exclamation(response: str) -> bool:
    """True without an exclamation mark."""
    return "!" not in response


@instruction("count:lowercase_counting", N=count)
def has_few_small_words(response: str, N: int) -> bool:
    """True when at most N words have no capital."""
    return sum(map(str.islower, word_tokens(response))) <= N


@instruction("letters:letter_counting", N=count, relation=relation)
def has_letters(response: str, N: int, relation: Relation) -> bool:
    """True when there are as many letters as the relation to N asks."""
    return relation(sum(map(str.isalpha, response)), N)


@instruction("count:count_unique")
def repeats_no_word(response: str) -> bool:
    """True when no word occurs twice, in any case."""
    found = _words(response)
    return len(set(found)) == len(found)


@instruction("count:counting_composition", n_sent=positive, n_words=positive)
def is_composed(response: str, n_sent: int, n_words: int) -> bool:
    """True for three parts between `***`, or `* * *`, of so many sentences each, of so many words each."""
    parts = [sentences(part) for part in divided(response.replace("* * *", "***"), "***")]
    return [len(part) for part in parts] == [n_sent] * 3 and all(
        len(word_tokens(one)) == n_words for part in parts for one in part
    )
