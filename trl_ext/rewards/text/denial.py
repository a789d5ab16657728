r"""Find whether a text denies the value that it names.

A denial is a direct negation of the value ("is not 42", "isn't 42", "anything but 42", "42 is wrong") or of the claim
that it is the answer ("I do not think that the answer is 42"). A negation of anything else denies nothing: "41 does
not work, so the answer is 42", "the answer is 42, not 41".
"""

import re

from trl_ext.rewards.text.phrases import DENIES, WRONG

WINDOW = 160  # characters before a value that are searched for a denial of a claim
_NEAR = 80  # characters before a value that are searched for a denial of the value

# Words directly before a value that deny it.
DENIAL = (
    r"(?:\b(?:not|never|neither|nor|cannot|no\ longer|anything\ but|everything\ but|all\ but|hardly|nowhere\ near"
    r"|(?:other|rather)\ than|instead\ of|except|rul(?:e|ed|ing)\ out|eliminat(?:e|ed|ing)"
    r"|different\ from|differs\ from|opposite\ of|far\ from|unlikely)\b"
    rf"|n't\b|\u2260|(?<![\d!)}}])!=|\\neq?\b|{DENIES})"
)
_FILLER = r"(?:\s(?:\w{2,12}ly|just|even|be|equals?|to|for|the|option|choice|answer|number|value|is))"
_OPENING = r"(?:\s|[$*_(\[:\\\"'`{])*+"
_DIRECT = re.compile(rf"{DENIAL}{_FILLER}{{0,3}}{_OPENING}\Z", re.IGNORECASE)
_SUBJECT = (
    r"(?:\s(?:that|if|whether|to|say|(?:it|that)'s|my|the|this|our|final|correct|right|answer|result|value|solution|it|there|option"
    r"|choice|number|is|are|was|be|equals?|would|could|should|can|will)\b|:){0,9}"
)
_CLAIM = re.compile(
    rf"(?:(?:\b(?:not|never|cannot|hardly)|n't)\s(?:\w{{2,12}}ly\s|yet\s)?(?:think|believe|say|mean|claim|sure"
    rf"|certain|suppose|expect|agree|know|convinced|assume|conclude|true|correct|right|likely|possible|the\ case)"
    rf"|\b(?:wrong|false|incorrect|untrue|unlikely|impossible|doubt|doubtful|deny)(?=\s(?:that|if|whether|to)\b))"
    rf"\b{_SUBJECT}{_OPENING}\Z",
    re.IGNORECASE,
)
_REFUSED = r"(?:wrong|incorrect|false|untrue|impossible|excluded|ruled\ out|no\ longer)\b"
_AFTER = re.compile(
    rf"[)\]}}.*$\s'\"`\\_]{{0,9}}"
    rf"(?:(?:is|was|are|would\ be|(?:is|was|are)(?:\ not|n't))\s(?:\w{{2,12}}ly\s)?{_REFUSED}"
    r"|(?:(?:is|was|would|can?|could)(?:\ not|n't)|cannot)\s(?:be\s)?"
    r"(?:the|right|correct|true|it|possible|valid)\b)"
    r"|[)\]}*$\s]{0,6}(?:[:,?]\s?(?:no\b(?!\s\w)|false\b|wrong\b|incorrect\b)|,?\s?or\snot\b)"
    rf"|[)\]}}*$]{{0,4}}{WRONG}"
    r"|[\s,(*$]{0,9}not(?:\s(?:really|quite|exactly|at\ all|right|correct|true))?\s?(?:[.!?)]|$)",
    re.IGNORECASE,
)
# "42, not 41", "42 rather than 41", "B (not A)": a second value that is denied.
_VALUE = r"[$\\(*]{0,4}(?:[-+]?[0-9][0-9.,/]*+|\(?[A-Z](?![A-Za-z]))(?:[$*)]|%){0,4}"
_CONTRAST = re.compile(
    rf"(?<=[0-9A-Z$)\]}}*%])(?<![A-Za-z][A-Z])\s{{0,2}}[,(;]?\s?(?:(?:and|but)\s)?"
    rf"(?:not|rather\ than|instead\ of|as\ opposed\ to)\s{_VALUE}"
)
_INSTEAD = re.compile(rf"\bnot\s{_VALUE},?\sbut\s(?:rather\s)?", re.IGNORECASE)


# Each denial contains one of these; a search for them costs a tenth of the patterns.
_CLAIMS = "not|never|hardly|n't|wrong|false|incorrect|untrue|unlikely|impossible|doubt|deny".split("|")
_DIRECTS = (
    "not|never|hardly|n't|unlikely|nor|no l|neither|but| than|instead|except|differ|far from|opposite|nowhere| out"
    "|liminat|\u2260|!=|\\ne|不|别选|勿选|莫选|并非|没有|除了|排除|nicht|niemals|kein|n'est|pense pas|no es"
    "|no puede|no creo|nunca|non è|não|не"
).split("|")


def denied_before(text: str, end: int) -> bool:
    """Return True if the words that end at `end` deny the next words; `2!=` is a factorial and no inequality."""
    before = text[max(0, end - WINDOW) : max(0, end)]
    lowered = before.lower()
    near = lowered[-_NEAR:]
    if any(map(near.__contains__, _DIRECTS)) and _DIRECT.search(before, max(0, len(before) - _NEAR)):
        return True
    return any(map(lowered.__contains__, _CLAIMS)) and _CLAIM.search(before) is not None


def denied_behind(text: str, start: int) -> bool:
    """Return True if the words after the value that ends at `start` deny it: "is wrong", ", not really"."""
    return _AFTER.match(text, start) is not None


def begins_with_denial(text: str) -> bool:
    """Return True for "not 42", "n't 42", "certainly not 42"."""
    return _AT_ONCE.match(text) is not None


def without_contrast(text: str) -> str:
    """Remove a denied second value: "42, not 41" and "not 41 but 42" become "42"."""
    if "not" not in text and "than" not in text and " of " not in text and "opposed" not in text:
        return text
    return _INSTEAD.sub("", _CONTRAST.sub("", text))


_AT_ONCE = re.compile(rf"(?:\w{{2,12}}ly\s)?{DENIAL}", re.IGNORECASE)
