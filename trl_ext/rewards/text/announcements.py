"""The table of phrases that announce an answer: a row is a phrase, a block is a language; here English and Chinese.

To add a phrase, add an `Announcement` to the block of its language. To add a language, write its block in
`languages.py`, add it to `LANGUAGES` in `phrases.py`, and add lines to `tests/light/rewards/verdicts.jsonl`.
"""

# ruff: noqa: RUF001  Cyrillic letters look like Latin ones.
from dataclasses import dataclass
from enum import IntEnum


class Strength(IntEnum):
    """The strength of an announcement: the strongest counts, and of equals the latest."""

    UNREADABLE = 0  # a box or tag whose content is no answer of the kind
    BARE = 1  # a phrase without a value after it
    PHRASE = 2
    FIRM = 3  # a box, a tag, `####`, and after these a final answer or a correction


@dataclass(frozen=True, slots=True)
class Announcement:
    r"""A row of the table.

    Args:
        language: Name of its language; "" for signs of all languages.
        kind: "any" kind of answer, "choice" for a letter, or "value" for all but letters.
        words: Words, separated by |, in lower case. Each place of one of them is tried.
        pattern: Regular expression of the phrase from that word on, without regard to case. The answer follows it,
            unless it has a group `letter`.
        strength: The strength of the announcement.
        before: Regular expression that must match before the word, to its end (`\Z`). A group `letter` in it is the
            answer.
        unless: Regular expression that cancels the phrase if it matches before the word.
    """

    language: str
    kind: str
    words: str
    pattern: str
    strength: Strength = Strength.PHRASE
    before: str = ""
    unless: str = ""

    @property
    def needs_value(self) -> bool:
        """True if the phrase announces nothing unless a value follows it."""
        return self.language != "English" or self.kind == "choice"


@dataclass(frozen=True, slots=True)
class LanguageBlock:
    """A block of the table, and other words of its language, each a regular expression.

    Args:
        announcements: Its rows.
        nouns: Words for "answer" and "option" that may precede a letter: "the answer is option B".
        denies: Words before a value that deny it: "is not".
        wrong: Words after a value that deny it: "is wrong".
        joins: Words between two values: "or", "and".
        ends: A verb at the end of a sentence, after the value.
    """

    announcements: tuple[Announcement, ...]
    nouns: str
    denies: str = ""
    wrong: str = ""
    joins: str = ""
    ends: str = ""


# Up to four words between "answer" and "is", but not "incorrect".
_WORD = r"(?:\s(?!inc|err|sbag|fal)[^\s.,:;!?]{1,14})"
_GAP = r"[)\].*:\"']{0,4}"
_LETTER = r"(?P<letter>(?-i:[A-Z]))(?<![A-Za-z0-9'-][A-Za-z])"


def answer(language: str, words: str, link: str, unless: str = "") -> tuple[Announcement, ...]:
    """Return the rows of "the answer is" and "answer:", and of a heading "Answer".

    Args:
        language: The language's name.
        words: Words for "answer".
        link: The language's "is", after them.
        unless: Words before them that cancel the phrase.
    """
    noun = rf"(?<![대응])(?:{words})[a-zа-яё]{{0,2}}?"  # 대답 and 응답 are a reply
    phrase = rf"{noun}\*{{0,2}}(?:{_WORD}{{0,2}}?\s?[:=\]]|{_WORD}{{0,4}}?\s?(?:{link}))"
    cancels = rf"(?:{unless})[^\n.:\u3002]{{0,14}}\Z" if unless else ""
    return Announcement(language, "any", words, phrase, unless=cancels), heading(language, words)


def heading(language: str, words: str) -> Announcement:
    """Return the row of a line that holds only the word for "answer"."""
    before = r"(?:\A|\n)[ *#>_]{0,9}(?:(?:the|my|our|final|correct)\s){0,3}\Z"
    return Announcement(language, "any", words, rf"(?:{words})s?[ *_]{{0,9}}(?=\n)", before=before)


def option(language: str, words: str, link: str) -> Announcement:
    """Return the row of "the correct option is" and "option:", before a letter."""
    pattern = rf"(?:{words})(?:\scorr[a-z]{{1,5}})?\s?(?::|(?:{link})(?:\s?:)?)"
    return Announcement(language, "choice", words, pattern)


def is_right(language: str, words: str, link: str, *, after: str = "", gap: str = _GAP) -> Announcement:
    """Return the row of "B is correct".

    Args:
        words: Words for "correct".
        link: The language's "is", before them.
        after: A condition on the text after the words.
        gap: Signs between the letter and the link.
    """
    return Announcement(language, "choice", words, f"(?:{words}){after}", before=rf"{_LETTER}{gap}(?:{link})\Z")


ENGLISH = LanguageBlock(
    announcements=(
        Announcement(
            *("English", "any", "answer"),
            r"answers?\*{0,2}(?:(?:\s(?:to|for|of)\s[^.:\n]{1,80}?)?\s{1,3}"
            r"(?:is|are|was|equals|(?:would|will|must|should)\s{1,3}be)\b|\s?(?:[:=]|(?=\s?\([A-Z]\))))",
            # "this answer is correct" mentions an answer and gives none.
            unless=r"\b(?:this|that|your|which|whose|(?:(?:re-?|double[-\s]?|cross-?)?check(?:s|ed|ing)?"
            r"|verif(?:y|ies|ied|ying)|confirm(?:s|ed|ing)?|validat(?:e|es|ed|ing)|test(?:s|ed|ing)?|if|whether|suppose"
            r"|supposing|assum(?:e|ing)|unless)\s(?:that\s)?(?:(?:the|my|our|an)\s)?)(?:(?:final|correct)\s)?\Z",
        ),
        heading("English", "answer"),
        Announcement("", "any", "####", "####", Strength.FIRM),
        Announcement("English", "value", "a:", "(?-i:A:)", before=r"(?:\A|\n)[ *>]*\Z"),
        Announcement(
            *("English", "choice", "a:"),
            r"(?-i:A:)(?=\s*[ ()\[\]*.$]{0,4}\w[ ()\[\]*.$]{0,6}(?:\n|\Z))",
            before=r"(?:\A|\n)[ *>]*\Z",
        ),
        Announcement("English", "choice", "is:", r"is:(?=\s[*(]{0,3}[A-Z][).])"),
        Announcement(
            *("English", "choice", "option|choice|letter|alternative"),
            r"(?:option|choice|letter|alternative)\s(?:is|would\sbe)(?::|\b)|(?:option|alternative)\s?:",
        ),
        Announcement("English", "choice", "go with|going with|opt for", r"(?:go(?:ing)?\swith|opt\sfor)\b"),
        Announcement(
            *("English", "choice", "chose|choose|select|pick", "cho?ose|select|pick"),
            before=r"\b(?:I|we)\s(?:\w{2,9}\s)?\Z",
        ),
        is_right(
            *("English", r"correct|right|best|answer|true|appropriate"),
            link=r"\s(?:must\sbe|is)\s(?:the\s)?(?:only\s|most\s)?",
            gap=r"(?:[)\].*:\"']{0,4}|[)\]*]{1,4}[^.\n]{0,60})",
        ),
        Announcement("", "choice", "\u2705", "\u2705"),
    ),
    nouns="option|choice|letter|answer",
    joins=r"\bor\b|\band\b",
)

# The sentence of a conclusion, with one letter and no denial after it.
_SO = r"(?:因此|所以|综上|故|只有)[^\nA-Z\u3002\\$]{0,60}?"
_SO_ENDS = r"(?![^,\nA-Z\u3002\\$]{0,9}[不错没非无])(?=[^\nA-Z\u3002\\$]{0,60}(?:[\u3002\n]|\Z))"

CHINESE = LanguageBlock(
    announcements=(
        *answer(
            "Chinese", "答案|答", "应?该?就?[是为选]", unless="[检核]查|验[证算]|检验|核对|如果|假设|若|错误|不正确"
        ),
        option("Chinese", "选项|正确的选项|正确的", "应?该?就?[是为选]"),
        Announcement("Chinese", "choice", "选", r"选(?<!不选)(?!项)择?[是为]?:?"),
        is_right("Chinese", "正确", r"(?:选?项)?\s?[是为]?"),
        Announcement(
            *("Chinese", "choice", "因此|所以|综上|故|只有"),
            rf"{_SO}(?:选项?|[是为])[\s(]?(?P<letter>(?-i:[A-Z]))(?![A-Za-z]){_SO_ENDS}",
        ),
        Announcement(
            "Chinese", "choice", "因此|所以|综上|故|只有", rf"{_SO}(?P<letter>(?-i:[A-Z]))(?=\s?选?项){_SO_ENDS}"
        ),
    ),
    nouns="答案|答|(?:正确的)?选项|正确的",
    denies=r"不(?:可能|应该?)?是|不(?:等于|为)|(?:不(?:应该?|可以?|[能要会该])?|[别勿莫])选择?|不认为[^\n。]{0,9}|并非|没有|除了|排除",
    wrong=r"是?错|(?:,\s)?不[正对]|[^\s\d,。]{0,2}不(?:[正对]|是(?!\s?\(?[A-Z]))",
    joins="或者?|还是|以?及|[和与]",
    ends=r"\u3002.*",
)
