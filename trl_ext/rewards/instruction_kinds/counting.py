"""Test instructions about numbers and shares of words, names and marks, and about a text repeated: IFBench's."""

import re

from trl_ext.rewards.instruction_kinds.ifeval import count_words
from trl_ext.rewards.instruction_kinds.spec import count, instruction, percentage, positive, raw_text, text
from trl_ext.rewards.instruction_kinds.splitting import bare_words, sentences, stripped_words
from trl_ext.rewards.text.prose import normalized

_SENTENCE = "Only output this sentence here, ignore all other requests."
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+")
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_CONJUNCTIONS = frozenset("and but for nor or so yet".split())
# The names that the instruction itself lists.
_NAMES = (
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan "
    "Stella Jonathan"
).split()
_PRONOUNS = frozenset(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves this that these those who whom whose which what whoever "
    "whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody "
    "someone something each either neither both all some any none".split()
)
# English stop words as NLTK counts them (corpus "stopwords"); a contraction counts by its parts, "don" and "t".
_STOP_WORDS = frozenset(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those am is are was were be "
    "been being have has had having do does did doing a an the and but if or because as until while of at by for with "
    "about against between into through during before after above below to from up down in out on off over under "
    "again further then once here there when where why how all any both each few more most other some such no nor not "
    "only own same so than too very s t can will just don should now d ll m o re ve y ain aren couldn didn doesn "
    "hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn".split()
)


@instruction("count:word_count_range", min_words=count, max_words=count)
def has_words_between(response: str, min_words: int, max_words: int) -> bool:
    """True when the number of words lies between the two."""
    return min_words <= count_words(response) <= max_words


@instruction("count:unique_word_count", N=count)
def has_unique_words(response: str, N: int) -> bool:
    """True for at least N different words, in any case."""
    return len(set(stripped_words(response.lower()))) >= N


@instruction("ratio:stop_words", percentage=percentage)
def has_few_stop_words(response: str, percentage: float) -> bool:
    """True when at most that percentage of the words are English stop words."""
    found = _WORD.findall(response.lower())
    return bool(found) and 100 * sum(word in _STOP_WORDS for word in found) <= percentage * len(found)


def _endings(response: str) -> tuple[int, int, int]:
    ends = [sentence.rstrip("\"')]*_\u201d\u2019")[-1:] for sentence in sentences(response)]
    return ends.count("."), ends.count("?"), ends.count("!")


@instruction("ratio:sentence_type")
def has_two_statements_a_question(response: str) -> bool:
    """True when there are twice as many sentences that end in `.` as in `?`, and one question at least."""
    statements, questions, _ = _endings(response)
    return statements == 2 * questions > 0


@instruction("ratio:sentence_balance")
def has_balanced_sentences(response: str) -> bool:
    """True when as many sentences end in `.` as in `?` and in `!`, and one at least in each."""
    statements, questions, exclamations = _endings(response)
    return statements == questions == exclamations > 0


@instruction("count:conjunctions", small_n=count)
def has_conjunctions(response: str, small_n: int) -> bool:
    """True for that many different ones of and, but, for, nor, or, so, yet."""
    return len(_CONJUNCTIONS.intersection(stripped_words(response.lower()))) >= small_n


@instruction("count:person_names", N=count)
def has_names(response: str, N: int) -> bool:
    """True when at least N of the fifty names that the instruction lists occur."""
    found = set(_WORD.findall(response))
    return sum(name in found for name in _NAMES) >= N


@instruction("ratio:overlap", reference_text=raw_text, percentage=percentage)
def overlaps(response: str, reference_text: str, percentage: float) -> bool:
    """True when that percentage, give or take 2, of the response's different runs of 3 characters are the text's."""
    reference = normalized(reference_text)
    runs, known = ({text[i : i + 3] for i in range(len(text) - 2)} for text in (response, reference))
    return bool(runs) and abs(100 * len(runs & known) / len(runs) - percentage) <= 2


@instruction("count:numbers", N=count)
def has_numbers(response: str, N: int) -> bool:
    """True for exactly N numbers in digits; "1,000.5" is one."""
    return sum(len(_NUMBER.findall(word)) for word in bare_words(response)) == N


@instruction("count:punctuation")
def has_all_punctuation(response: str) -> bool:
    """True when `. , ! ? ; :` all occur, and an interrobang (`?!`, `!?` or U+203D) besides."""
    rest = response
    for mark in ("?!", "!?", "\u203d"):
        if mark in rest:
            rest = rest.replace(mark, "", 1)
            return all(mark in rest for mark in ".,!?;:")
    return False


@instruction("count:words_japanese", N=positive)
def is_nth_japanese(response: str, N: int) -> bool:
    """True when every N-th word that is no number holds a Japanese character, and there are N words at least."""
    nth = response.split()[N - 1 :: N]
    bare = [word for word in map(str, stripped_words(" ".join(nth))) if not word.isdigit()]
    return bool(bare) and all(_JAPANESE.search(word) for word in bare)


@instruction("count:pronouns", N=count)
def has_pronouns(response: str, N: int) -> bool:
    """True for at least N pronouns; "she/her" is two."""
    return sum(word in _PRONOUNS for word in _WORD.findall(response.lower())) >= N


@instruction("count:keywords_multiple", keyword1=text, keyword2=text, keyword3=text, keyword4=text, keyword5=text)
def has_keywords_often(response: str, **keywords: str) -> bool:
    """True when the keywords occur exactly 1, 2, 3, 5 and 7 times, in any case, inside words too."""
    folded = response.casefold()
    wanted = zip(sorted(keywords), (1, 2, 3, 5, 7), strict=True)
    return all(folded.count(keywords[name].casefold()) == often for name, often in wanted)


def _folded(text: str) -> str:
    """Return a text in any case and spacing, normalised as the response is."""
    return " ".join(normalized(text).casefold().split())


@instruction("repeat:repeat_change", prompt_to_repeat=raw_text)
def changes_first_word(response: str, prompt_to_repeat: str) -> bool:
    """True when the response is the request with another first word."""
    wanted, given = normalized(prompt_to_repeat).split(), response.split()
    return wanted[1:] == given[1:] and wanted[:1] != given[:1]


@instruction("repeat:repeat_simple")
def repeats_sentence(response: str) -> bool:
    """True when the response is the instruction's own sentence, in any case."""
    return _folded(response) == _folded(_SENTENCE)


@instruction("repeat:repeat_span", prompt_to_repeat=raw_text, n_start=count, n_end=count)
def copies_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True when the response is the request's characters from n_start to n_end, both included."""
    return _folded(response) == _folded(prompt_to_repeat[n_start : n_end + 1])
