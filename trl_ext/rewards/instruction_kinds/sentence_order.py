"""Test instructions about sentences and paragraphs beside each other: IFBench's `sentence:` and kin."""

import string
from itertools import pairwise

from trl_ext.rewards.instruction_kinds.spec import instruction, positive, text
from trl_ext.rewards.instruction_kinds.splitting import bare_words, sentences, stripped_words
from trl_ext.rewards.text.prose import count_word


@instruction("sentence:alliteration_increment")
def alliterates_more(response: str) -> bool:
    """True when each of two or more sentences has more words beside one with the same first letter than the last."""
    lengths = [_alliteration(sentence) for sentence in sentences(response)]
    return len(lengths) > 1 and all(left < right for left, right in pairwise(lengths))


def _alliteration(sentence: str) -> int:
    initials = [word[0] for word in (part.lstrip(string.punctuation) for part in sentence.lower().split()) if word]
    alike = [left == right for left, right in pairwise(initials)]
    return sum(alike) + sum(now and not before for before, now in pairwise([False, *alike]))


@instruction("sentence:increment", small_n=positive)
def grows(response: str, small_n: int) -> bool:
    """True when each of two or more sentences has exactly `small_n` words more than the one before."""
    lengths = [len(bare_words(sentence)) for sentence in sentences(response)]
    return len(lengths) > 1 and all(right - left == small_n for left, right in pairwise(lengths))


@instruction("sentence:keyword", word=text, N=positive)
def has_keyword_in(response: str, word: str, N: int) -> bool:
    """True when the N-th sentence holds the word, in any case."""
    nth = sentences(response)[N - 1 : N]
    return bool(nth) and count_word(nth[0].casefold(), word.casefold(), 1) > 0


@instruction("words:last_first")
def chains_sentences(response: str) -> bool:
    """True when the last word of each sentence is the first of the next, in any case; two sentences at least."""
    found = [stripped_words(sentence.lower()) for sentence in sentences(response)]
    return len(found) > 1 and all(found) and all(left[-1] == right[0] for left, right in pairwise(found))


@instruction("words:paragraph_last_first")
def wraps_paragraphs(response: str) -> bool:
    """True when each line ends with the word that it starts with, in any case, and one has several words."""
    found = [words for words in (stripped_words(line) for line in response.lower().split("\n")) if words]
    return any(len(words) > 1 for words in found) and all(words[0] == words[-1] for words in found)


@instruction("ratio:sentence_words")
def has_equal_sentences(response: str) -> bool:
    """True for three sentences of as many characters each that share no word, in any case."""
    found = sentences(response)
    if len(found) != 3 or len({len(sentence) for sentence in found}) > 1:
        return False
    words = [set(stripped_words(sentence.lower())) for sentence in found]
    return len(set().union(*words)) == sum(map(len, words))
