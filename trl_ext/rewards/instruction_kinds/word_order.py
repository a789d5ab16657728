"""Test instructions about words and sentences, one by one or next to each other: IFBench's `words:`, `sentence:`."""

import string
from collections import Counter
from itertools import pairwise

from trl_ext.rewards.instruction_kinds.spec import count, instruction, positive, text, word
from trl_ext.rewards.instruction_kinds.splitting import bare_words, sentences, stripped_words, word_tokens
from trl_ext.rewards.text.prose import count_word

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_CONSONANTS = frozenset("bcdfghjklmnpqrstvwxyz")
_PRIMES = frozenset({2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43})
_MAX_WORD = 45  # letters of the longest word in a dictionary of English


@instruction("words:alphabet")
def is_alphabet_loop(response: str) -> bool:
    """True when each word starts with the next letter of the alphabet, "a" behind "z"; two words at least."""
    letters = "".join(word[0].lower() for word in bare_words(response))
    start = _ALPHABET.find(letters[:1])
    wanted = _ALPHABET[start:] + _ALPHABET * (len(letters) // 26 + 1)
    return len(letters) > 1 and start >= 0 and wanted.startswith(letters)


@instruction("words:vowel")
def has_three_vowels(response: str) -> bool:
    """True for one line with at most three of the vowels a, e, i, o, u."""
    response = response.strip().lower()
    return "\n" not in response and sum(vowel in response for vowel in "aeiou") <= 3


@instruction("words:consonants")
def has_clusters(response: str) -> bool:
    """True when two consonants stand side by side in each word."""
    return all(any(_CONSONANTS.issuperset(pair) for pair in pairwise(word)) for word in response.lower().split())


@instruction("words:palindrome")
def has_palindromes(response: str) -> bool:
    """True for at least ten palindromes of five characters and more, each a word; the same one may count again."""
    found = bare_words(response.lower())
    return sum(len(word) >= 5 and word == word[::-1] for word in found) >= 10


@instruction("words:prime_lengths")
def has_prime_lengths(response: str) -> bool:
    """True when the number of characters of each word is prime."""
    found = bare_words(response)
    return bool(found) and all(len(word) in _PRIMES for word in found)


@instruction("words:repeats", small_n=count)
def has_few_repeats(response: str, small_n: int) -> bool:
    """True when no word, in any case, occurs more than `small_n` times."""
    return max(Counter(bare_words(response.lower())).values(), default=0) <= small_n


@instruction("words:odd_even_syllables", needs="syllapy")
def alternates_syllables(response: str) -> bool:
    """True when words with an odd and with an even number of syllables take turns; two words at least."""
    import syllapy

    found = bare_words(response.lower())
    if len(found) < 2 or max(map(len, found)) > _MAX_WORD:
        return False
    odd = [syllapy.count(word) % 2 for word in found]
    return all(left != right for left, right in pairwise(odd))


@instruction("words:start_verb", needs="lemminflect")
def starts_with_verb(response: str) -> bool:
    """True when the first word can be a verb in English: "run" and "running", though both can be nouns."""
    from lemminflect import getAllLemmas

    first = next(iter(word_tokens(response[:1000])), "").lower()
    return 0 < len(first) <= _MAX_WORD and bool({"VERB", "AUX"}.intersection(getAllLemmas(first)))


@instruction("words:no_consecutive")
def has_no_same_initials(response: str) -> bool:
    """True when no two words side by side start with the same letter, in any case."""
    initials = [word[0] for word in bare_words(response.lower())]
    return all(left != right for left, right in pairwise(initials))


@instruction("words:keywords_specific_position", keyword=word, n=positive, m=positive)
def has_keyword_at(response: str, keyword: str, n: int, m: int) -> bool:
    """True when the m-th word of the n-th sentence is the keyword, in any case."""
    nth = sentences(response)[n - 1 : n]
    return bool(nth) and [word.casefold() for word in word_tokens(nth[0])[m - 1 : m]] == [keyword.casefold()]


@instruction("words:words_position", keyword=text)
def has_keyword_second(response: str, keyword: str) -> bool:
    """True when the second word and the last but one are the keyword, in any case."""
    found = word_tokens(response.casefold())
    return len(found) > 2 and found[1] == found[-2] == keyword.casefold()


@instruction("sentence:alliteration_increment")
def alliterates_more(response: str) -> bool:
    """True when each of two or more sentences has more words beside one with the same first letter than the last."""
    lengths = []
    for sentence in sentences(response):
        initials = [word[0] for word in (part.lstrip(string.punctuation) for part in sentence.lower().split()) if word]
        alike = [left == right for left, right in pairwise(initials)]
        lengths.append(sum(alike) + sum(now and not before for before, now in pairwise([False, *alike])))
    return len(lengths) > 1 and all(left < right for left, right in pairwise(lengths))


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
