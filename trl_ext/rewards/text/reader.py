r"""Find where a text states its answer, for `Answer` and `Math`.

Six anchors announce an answer: `\boxed{...}`, `<answer>...</answer>`, {"answer": ...} at the end, `####`, a line that
starts with `A:`, and a phrase of the table of `announcements` ("the answer is", "Final answer:", a heading "Answer").
Each gives a `Candidate`, and `choose` takes the strongest, and of equals the latest: a model may correct itself, and
several answers earn nothing more. A box, a tag and `####` are stronger than a phrase, because models check their boxed
answer; after one of them a "final answer" and a correction ("Wait, the answer is 43") are as strong. A check, a
condition ("if the answer is 7") and a phrase without a value ("this answer is correct") announce nothing if there is
another anchor. All boxes, or all tags, are one candidate.

After a phrase the value follows at once, after line breaks, or after the verb of a sentence ("Final Answer: The
largest $n$ is 34."). A denied anchor (see `denial`) is no answer. Every search takes time linear in the text.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from trl_ext.rewards.text import number_words as known
from trl_ext.rewards.text.announcements import Strength
from trl_ext.rewards.text.denial import begins_with_denial, denied_before, denied_behind, without_contrast
from trl_ext.rewards.text.phrases import ENDS, LETTER, Phrase, find_phrases
from trl_ext.rewards.text.prose import ONE_UNSPACED, answer_tags, boxes

MAX_CONTENT = 8_000  # characters that are read after a phrase
_NUMBERS = ("number", "maths")  # kinds whose answers are numbers
_TO_ENCLOSE = ("\\boxed", "<answer>", "JSON")

# Words before a phrase that make it a final answer or a correction.
_CORRECTS = re.compile(
    r"final\s\Z|\b(?:wait|actually|correction|sorry|oops|no(?=[,.:;!]))\b[^\n]{0,40}\Z",
    re.IGNORECASE,
)
_SPELLED = re.compile(  # "forty-two (42)"
    r"(?i)(?<![\w-])(?:(?:an?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,5}(?:teen|ty)|hundred"
    r"|thousand|million|dozen|and)[\s-])+\((\$?[0-9][0-9.,]*)\)"
)
_OPENING_LETTER = re.compile(r"[\s$\\]*(?:\\?(?:text|mathrm|mathbf|textbf|boldsymbol)\s?\{)?" + LETTER, re.IGNORECASE)
# A box or tag must match its kind's pattern to be read.
_READABLE = {
    "choice": re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])|\A[a-z]\Z"),
    "number": re.compile(r"[0-9\u00bc-\u00be]|half|\A\W*\Z"),
}
# An empty box: models copy it from a task with a blank.
_BLANK = re.compile(
    r"(?>(?:\\[hv]?phantom\s?\{[^{}]*\}|\\(?:quad|qquad|square|Box)(?![A-Za-z])|\\?[_ ,;!]|[\s?.$~])*)"
)
# A comma or point that may be decimal or a separator, in a language with decimal commas.
_EITHER = re.compile(
    rf"[\s$\u20ac*(]*(?:{known.ABOUT})?(-?[1-9]\d{{0,2}}[.,]\d{{3}})(?![\d\\^]|[.,/]\d)", re.IGNORECASE
)
_COLON = re.compile(r".?\s?[:=\]]", re.DOTALL)
_ONE_WORD = re.compile(r"[a-z\u00df-\u00ff\u0430-\u0451']+\s[-\d][^\n]{0,25}\Z", re.IGNORECASE)
_CLAUSE = re.compile(r"[,.\u3002;:](?!\d)")
_NUMERAL = re.compile(r"[0-9]")
_SPACE = " \t\r\n,:*=}"
_BULLET = re.compile(r"(?:[-\u2022>]\s)?\**")
FORMULA = re.compile(
    r"\$\$([^$]{1,4000})\$\$|\$([^$\n]{1,4000})\$|\\\((.{1,4000}?)\\\)|\\\[(.{1,4000}?)\\\]", re.DOTALL
)
# Words before an announced number.
LEADS = (
    r"[\s*_`\"'(\[{]*+(?>(?:(?:(?:therefore|thus|then|so|simply|just|exactly|approximately|about|equal\ to"
    rf"|equals|a\ total\ of|given\ by|USD?|EUR|GBP|CNY|RMB|INR|Rs\.?)[\s,:]++|{known.ABOUT})*))[*_`\"'(\[{{]*+"
)
_VALUE = re.compile(
    LEADS + r"(?:[-+\u2013\u00b1]?\s?(?:[$\u20ac\u00a3\u00a5]\s?)?(?:\.?[0-9]"
    r"|[$\\\u00bc-\u00be\u221a\u03c0\u221e|{\[])|[A-Za-z](?:_\{?\w\}?)?(?:\([A-Za-z]\))?\s?[=^*/+-]|<<|(?:sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])|[-+]?[A-Za-z]\.?\s?\Z|(?:one\s|a\s)?half\b)",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|becomes|has|have|had|makes?|made|earns?|needs?|costs?|takes?|gets?|pays?|paid"
    r"|spends?|saves?|receives?|sells?|sold|of|will|total)\b|[=:])"
    r"(?:\s{0,3}(?:only|still|exactly|equal\ to|a\ total\ of|now)\b)?",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"[\s*_`(]*[-+]?\s?(?:[$\u20ac\u00a3\u00a5\\]|[0-9])")
_ONE_AMOUNT = re.compile(r"(?<=[a-z]\s)[$\\]{0,2}[0-9][0-9.,]*(?![^\s$%.,])|(?<![a-z]\s)[$\\]{0,2}(?<![0-9])[0-9]+")
_SENTENCE_END = re.compile(r"(?<=[^\s.])\.(?:\s|$)|[\n!?]")
_TURNED = re.compile(
    r"\b(?:half|third|quarter|twice|double|triple|times|than|least|most|over|under|between|up\ to|before|after|one\ of"
    r"|except|if|unless|maybe|perhaps|either|or|not|never|nor|part\ of|square|root|power|sum|product|opposite|inverse"
    r"|reciprocal|multiple|factor|divisor|successor|predecessor)\b|n't",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Following:
    """The line after a phrase.

    `is_below` is True if a line break precedes it, `is_heading` if more lines follow as well. `has_value` is True if
    it begins with a value. `rest` is the text from the line on, unchanged.
    """

    text: str
    is_below: bool
    is_heading: bool
    has_value: bool
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer that a text announces.

    Args:
        anchor: The phrase, box or tag that announces it.
        contents: The raw answer, or one for each box or tag; () unless `status` is "ok" or "undecided".
        status: A Verdict's status: "no_answer" if it is denied, empty or not closed.
        detail: The reason of a status, for people.
        rest: The text after a phrase, unchanged, unless the phrase is denied.
        end: Position of the first character after its announcement.
        strength: The strength of its announcement.
        before: The last characters before a phrase; "" if no value follows it.

    Candidates are equal at any position in a text: `Math` judges equal answers once.
    """

    anchor: str
    contents: tuple[str, ...]
    status: str = "ok"
    detail: str = ""
    rest: str = field(default="", compare=False)
    end: int = field(default=0, compare=False)
    strength: Strength = field(default=Strength.FIRM, compare=False)
    before: str = field(default="", compare=False)

    @property
    def encloses(self) -> bool:
        """True if the anchor marks the end of its content, as a box or a tag does."""
        return self.anchor in _TO_ENCLOSE

    @property
    def corrects(self) -> bool:
        """True for a final answer or a correction, which counts as much as a box before it."""
        return _CORRECTS.search(self.before) is not None

    def without_answer(self, status: str, detail: str) -> "Candidate":
        """Return the candidate without its answer, for a reason."""
        return replace(self, contents=(), status=status, detail=f"'{self.anchor}' {detail}")


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The answer in a text: the value to compare or None, a Verdict's status, and a line for people.

    `is_left` is True if the value is left to compute: `36/2` for 18.
    """

    value: object
    status: str
    detail: str
    is_left: bool = False


def read_all(found: Candidate, read: Callable[[str], AnswerReading]) -> AnswerReading:
    """Read the contents of a candidate: different values are a conflict, an undecided answer gives all its values."""
    if found.status not in ("ok", "undecided"):
        return AnswerReading(None, found.status, found.detail)
    readings = [read(content) for content in found.contents]
    last = readings[-1]
    if found.status == "undecided":
        return AnswerReading(tuple(reading.value for reading in readings), found.status, found.detail)
    if any(reading.value != last.value for reading in readings[:-1]):
        shown = " and ".join(repr(content[:40]) for content in found.contents[:3])
        return AnswerReading(None, "conflict", f"different answers in '{found.anchor}': {shown}")
    return AnswerReading(last.value, last.status, f"'{found.anchor}': {last.detail}", last.is_left)


def choose(candidates: Iterable[Candidate], strongest: Strength = Strength.FIRM) -> Candidate | None:
    """Return the strongest candidate, and of equals the latest; None without any.

    After a box, a tag or `####` a final answer and a correction are as strong as these.

    Args:
        candidates: The candidates of a text, the latest first. None before a strongest candidate is read.
        strongest: The greatest strength that a candidate can have.
    """
    latest: list[Candidate] = []
    for candidate in candidates:
        if candidate.strength >= strongest:
            return next((one for one in latest if one.corrects), candidate)
        latest.append(candidate)
    return max(latest, key=lambda one: one.strength, default=None)


def find_answer(text: str, kind: str, trusted: bool = False) -> Candidate | None:
    """Return the answer that a text announces; None without an announcement.

    Args:
        text: The result of `visible`, or a gold column.
        kind: The kind of answer: "number", "maths", "choice" or "exact".
        trusted: True ignores denials, as in golds.
    """
    enclosed = _enclosure(text, kind, trusted)
    start, strongest = 0, Strength.PHRASE
    if enclosed and enclosed.strength is Strength.FIRM:  # No phrase before it is stronger.
        start, strongest = enclosed.end, Strength.FIRM
    phrases = sorted(find_phrases(text, kind, start), key=lambda phrase: phrase.end, reverse=True)
    strongest = max([strongest, *(phrase.row.strength for phrase in phrases)])
    spoken = (_after(text, phrase, kind, trusted) for phrase in phrases)
    return choose(filter(None, chain(spoken, (enclosed,))), strongest)


def _enclosure(text: str, kind: str, trusted: bool) -> Candidate | None:
    """Return the answer in the boxes, or in the tags, of a text; in those that come last."""
    found = max(filter(None, (boxes(text), answer_tags(text))), key=lambda one: one.start, default=None)
    if found is None:
        return None
    # A box without a letter, or without a digit, is no answer to such a question.
    is_readable = kind not in _READABLE or any(map(_READABLE[kind].search, found.contents))
    strength = Strength.FIRM if is_readable else Strength.UNREADABLE
    filled = tuple(dict.fromkeys(content for content in found.contents if not _BLANK.fullmatch(content)))
    contents = filled if found.anchor == "\\boxed" else tuple(_inner(content, kind) for content in filled)
    candidate = Candidate(found.anchor, contents, end=found.end, strength=strength)
    if found.is_nested:
        return candidate.without_answer("conflict", "holds another one")
    if not found.contents:
        return candidate.without_answer("no_answer", "is not closed")
    if not trusted and (denied_before(text, found.start) or denied_behind(text, found.end)):
        return candidate.without_answer("no_answer", "is denied")
    return candidate if filled else candidate.without_answer("no_answer", "is empty")


def _inner(content: str, kind: str) -> str:
    """Return the answer in a tag, which may hold sentences as well as a formula (of maths, all that a tag holds)."""
    if kind == "exact":
        return content
    found = find_answer(content, kind)
    if found is not None:
        return found.contents[0] if found.contents else "?"
    return content if kind == "maths" or has_value(content, kind) else behind_verb(content, kind) or content


def _after(text: str, phrase: Phrase, kind: str, trusted: bool) -> Candidate | None:
    """Return the answer in the line after a phrase; None if the phrase announces nothing.

    Args:
        text: The whole text.
        phrase: The phrase that announces the answer.
        kind: The kind of answer: "number", "maths", "choice" or "exact".
        trusted: True ignores denials, as in golds.
    """
    line = _line(text, phrase, kind)
    candidate = _candidate(text, phrase, line)
    is_foreign_number = phrase.is_foreign and kind in _NUMBERS
    if is_foreign_number and not line.is_below and (doubtful := _doubtful(text, phrase, line, candidate)):
        return doubtful
    if _is_mention(phrase, line, is_foreign_number):
        return None
    if not trusted and (denied := _mark_denied(text, phrase, line, candidate)):
        return denied
    value = line.text if line.has_value else behind_verb(line.text, kind)
    if value is not None:
        return candidate if kind == "maths" or line.has_value else replace(candidate, contents=(value,))
    return None if line.is_below else replace(candidate, strength=Strength.BARE, before="")


def _mark_denied(text: str, phrase: Phrase, line: Following, candidate: Candidate) -> Candidate | None:
    """Return a candidate as denied if a denial precedes its phrase, or begins its line; else None.

    Args:
        text: The whole text.
        phrase: The phrase that announces the answer.
        line: The line after the phrase.
        candidate: This line as an answer.
    """
    if denied_before(text, phrase.start if phrase.letter else phrase.end):
        return replace(candidate.without_answer("no_answer", "is denied"), rest="")
    return candidate.without_answer("no_answer", "is denied") if begins_with_denial(line.text) else None


def _is_mention(phrase: Phrase, line: Following, is_foreign_number: bool) -> bool:
    """Return True for a heading before a solution, such as "Lösung:", and for a phrase without the value it needs."""
    if line.has_value:
        return line.is_heading and is_foreign_number
    return line.is_heading or phrase.row.needs_value


def _candidate(text: str, phrase: Phrase, line: Following) -> Candidate:
    """Return the whole line after a phrase as a candidate."""
    before = text[max(0, phrase.start - 60) : phrase.start]
    return Candidate(
        anchor=phrase.anchor,
        contents=(line.text,),
        rest=line.rest,
        end=phrase.end,
        strength=phrase.row.strength,
        before=before,
    )


def _doubtful(text: str, phrase: Phrase, line: Following, candidate: Candidate) -> Candidate | None:
    """Return a refusal of words before the number of another language, and a number with two meanings; else None.

    Args:
        text: The whole text.
        phrase: The phrase that announces the answer.
        line: The line after the phrase.
        candidate: This line as an answer.
    """
    is_sentence = _COLON.match(text, phrase.end - 1) and not _ONE_WORD.match(line.text)
    if not line.has_value and not is_sentence and _NUMERAL.search(_CLAUSE.split(line.text, maxsplit=1)[0]):
        return candidate.without_answer("no_answer", f": words before the number in '{line.text[:60]}'")
    either = None if ONE_UNSPACED.match(phrase.anchor) else _EITHER.match(line.text)
    if either is None:
        return None
    both = (re.sub("[.,]", "", either[1]), either[1].replace(",", "."))
    detail = f"'{either[1]}' is {both[0]} or {both[1]}"
    return replace(candidate, contents=both, status="undecided", detail=detail)


def _line(text: str, phrase: Phrase, kind: str) -> Following:
    """Return the line, or the formula and its line, after a phrase; a letter that the phrase holds is its line."""
    if phrase.letter:
        return Following(phrase.letter, is_below=False, is_heading=False, has_value=True)
    behind = text[phrase.end : phrase.end + MAX_CONTENT]
    rest = behind.lstrip(_SPACE)
    is_below = "\n" in behind[: len(behind) - len(rest)]
    content = _BULLET.sub("", rest, count=1) if is_below else rest
    formula = FORMULA.match(content)
    end = content.find("\n", formula.end() if formula else 0)
    line = _tidy((content if end < 0 else content[:end]).strip(), kind)
    is_heading = is_below and "\n" in text[phrase.end :].strip()
    return Following(line, is_below, is_heading, kind == "exact" or has_value(line, kind), rest)


def _tidy(line: str, kind: str) -> str:
    """Return a line without a denied second value, the verb at its end, and words for signs."""
    line = without_contrast(line if line.isascii() else ENDS.sub("", line))
    line = _SPELLED.sub(r"\1", line) if "(" in line else line
    return known.in_signs(line, with_roots=kind == "maths") if kind in _NUMBERS else line


def has_value(line: str, kind: str) -> bool:
    """Return True if a line starts with a value of the kind, after words such as "therefore" or "about"."""
    if kind == "choice":
        return (match := _OPENING_LETTER.match(line)) is not None and (match["letter"].isupper() or len(line) < 4)
    return _VALUE.match(line) is not None


def behind_verb(line: str, kind: str) -> str | None:
    """Return the value after the last verb of the first sentence, as in "The largest $n$ is 34", or None."""
    sentence = _SENTENCE_END.split(line[:400], maxsplit=1)[0]
    starts_with = _OPENING_LETTER if kind == "choice" else _AMOUNT
    ends = [match.end() for match in _VERB.finditer(sentence) if starts_with.match(sentence, match.end())]
    if not ends and kind != "choice" and sentence[:1].isupper():
        # A complete sentence with one number: "Jane sold it 3 hours ago".
        amounts = [*_ONE_AMOUNT.finditer(sentence)]
        ends = [amounts[0].start()] if len(amounts) == 1 else []
    if not ends or _TURNED.search(sentence, 0, ends[-1]) or denied_before(sentence, ends[-1]):
        return None
    return line[ends[-1] :].strip()
