r"""A short mathematical text as a tuple of tokens, one spelling for each meaning.

`\dfrac12`, `\tfrac{1}{2}` and `\frac {1} {2}` give the same tokens, and so do `10{,}000` and `10,000`, `\left( 1 \right)`
and `(1)`, `x^2` and `x^{2}`, `\text{East}` and `east`. Spaces separate tokens and are dropped, so `1 1/2` never becomes
`11/2`. A token is a LaTeX command, a number, one letter, one character, or words behind a `"`.

Only ASCII, full-width ASCII and the signs of `_SIGNS` are understood. Other digits (`٣`, `𝟑`, `³` behind nothing) and
invisible characters stay what they are, and no number is read from them.
"""

import re

from trl_ext.rewards.math_limits import MAX_NESTING, TooComplex, Unreadable

Tokens = tuple[str, ...]

WORDS = '"'  # Opens a token that holds words.
OPENING = frozenset({"(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\langle"})
CLOSING = frozenset({")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle"})

_TEXT = "text|textbf|textit|textrm|textnormal|textup|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol|bm"
_TOKEN = re.compile(
    rf"\\(?:{_TEXT})\s*\{{(?P<text>[^{{}}$]*)\}}"
    r"|\\(?:begin|end)\s*\{[A-Za-z*]+\}"
    r"|\\[A-Za-z]+|\\."
    r"|[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?|\.[0-9]+"
    r"|(?P<run>[A-Za-z]{2,})|\S",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|,\\,)\s*(?=[0-9]{3}(?![0-9]))")
_BRACKETED = re.compile(r"[(\[]|\\\{|\\lbrace|\\langle|matrix")

_SIGNS = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **dict.fromkeys(map(ord, "\u2212\u2013\u2014"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f"), " "),
    **dict.fromkeys(map(ord, "\u00b7\u22c5\u2219\u00d7"), " \\cdot "),
    **dict.fromkeys(map(ord, "\u00b0\u00ba"), " \\degree "),
    **{ord(sign): f" {command} " for sign, command in {
        "÷": "/", "π": "\\pi", "√": "\\sqrt", "∞": "\\infty", "≤": "\\leq", "≥": "\\geq", "≠": "\\neq", "±": "\\pm",
        "∪": "\\cup", "∩": "\\cap", "∈": "\\in", "∅": "\\emptyset", "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "α": "\\alpha", "β": "\\beta", "θ": "\\theta", "λ": "\\lambda",
        "φ": "\\phi", "⌊": "\\lfloor", "⌋": "\\rfloor", "⌈": "\\lceil", "⌉": "\\rceil",
    }.items()},
}  # fmt: skip

_DROPPED = frozenset(
    "\\left \\right \\big \\Big \\bigg \\Bigg \\bigl \\bigr \\Bigl \\Bigr \\displaystyle \\textstyle \\limits \\quad"
    " \\qquad \\! \\, \\; \\: \\> ~ \\( \\) \\[ \\] \\boldmath".split()
) | {"\\ ", "$", "\\\n"}
_SPELLING = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\le": "\\leq", "\\ge": "\\geq", "\\leqslant": "\\leq", "\\geqslant": "\\geq", "\\ne": "\\neq", "\\lt": "<",
    "\\gt": ">", "\\times": "\\cdot", "*": "\\cdot", "\\ast": "\\cdot", "\\div": "/", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]",
    "\\%": "%", "\\varnothing": "\\emptyset", "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\circ": "\\degree",
    "\\infin": "\\infty", ";": ",", "\\lor": ",", "\\land": ",",
}  # fmt: skip
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi gcd lcm max min".split()
)
_RUNS = {"infinity": "\\infty", "inf": "\\infty", "and": ",", "or": ",", "theta": "\\theta", "pm": "\\pm"}
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1, "\\overline": 1}
_UNITS = frozenset("cm mm km nm ft yd mi lb lbs kg mg oz ml mL sq deg mph kph hr hrs min sec rad kmh am pm".split())


def tokenize(text: str) -> Tokens:
    r"""The tokens of an answer or a gold.

    Raises:
        Unreadable: Braces do not close, or an argument is missing.
        TooComplex: Brackets are nested deeper than MAX_NESTING.

    Example:
        >>> tokenize(r"\\dfrac43 \\text{ cm}")
        ('\\\\frac', '{', '4', '}', '{', '3', '}', '"cm')
    """
    raw: list[str] = []
    for match in _TOKEN.finditer(_plain(text)):
        raw.extend(_spelled(match, raw[-1] if raw else ""))
    _check_nesting(raw)
    tokens, end = _sequence(raw, 0, 0)
    if end < len(raw):
        raise Unreadable("a brace closes that was never opened")
    return _trimmed(_joined_words(tokens))


def latex(tokens: Tokens) -> str:
    """LaTeX that reads as these tokens."""
    return " ".join(f"\\text{{{token[1:]}}}" if token.startswith(WORDS) else token for token in tokens)


def is_number(token: str) -> bool:
    """Whether a token is a number without sign."""
    return token[0] in "0123456789" or (token[0] == "." and len(token) > 1)


def split(tokens: Tokens, marks: frozenset[str]) -> list[tuple[str, Tokens]]:
    """The parts between the marks that stand outside all brackets, each with the mark before it ("" for the first)."""
    parts: list[tuple[str, Tokens]] = []
    mark, start, depth = "", 0, 0
    for position, token in enumerate(tokens):
        depth += _step(token)
        if depth == 0 and token in marks:
            parts.append((mark, tokens[start:position]))
            mark, start = token, position + 1
    return [*parts, (mark, tokens[start:])]


def closes_at(tokens: Tokens, start: int) -> int:
    """Where the bracket that opens at `start` closes; -1 where it does not. Half-open intervals close too."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += _step(tokens[position])
        if depth == 0:
            return position
    return -1


def _step(token: str) -> int:
    if token in OPENING or token.startswith("\\begin"):
        return 1
    return -1 if token in CLOSING or token.startswith("\\end") else 0


def _plain(text: str) -> str:
    """Signs as commands, thousands without separators, currency as `\\$`, no dollar as a delimiter."""
    if not text.isascii():
        text = text.translate(_SIGNS)
    text = _LATEX_THOUSANDS.sub("", text.strip())
    if not _BRACKETED.search(text):  # (1,000) is a pair, 1,000 is a number.
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if not (len(text) > 1 and text.startswith("$") and text.endswith("$") and not text.endswith("\\$")):
        text = re.sub(r"(?<![\\$])\$(?=\s?[0-9.])", r"\\$", text)
    return text


def _spelled(match: re.Match[str], before: str) -> list[str]:
    """The tokens of one match of _TOKEN; `before` is the token in front of it."""
    token = match[0]
    if match["text"] is not None:
        bold = token.startswith(("\\mathbf", "\\mathit", "\\bm", "\\boldsymbol"))
        return _text(match["text"], bold)
    if match["run"]:
        return _run(token, before)
    if token.startswith(("\\begin", "\\end")):
        return [re.sub(r"[\s*]", "", token)]
    return [] if token in _DROPPED else [_SPELLING.get(token, token)]


def _text(content: str, bold: bool) -> list[str]:
    """The tokens of `\\text{...}`: words, or maths where it holds a digit or no letter. One bold letter is a vector."""
    words = " ".join(content.split()).strip(".,;:")
    if words.lower() in ("and", "or"):
        return [","]
    if words in _FUNCTIONS:
        return ["\\" + words]
    letter = re.fullmatch(r"\(?([A-Za-z])\)?", words)
    if letter:
        return [letter[1] if bold else WORDS + letter[1]]
    if re.search(r"[0-9]", words) or not re.search(r"[^\W\d_]", words):
        return [token for match in _TOKEN.finditer(words) for token in _spelled(match, "")]
    return [WORDS + words.casefold()]


def _run(run: str, before: str) -> list[str]:
    """The tokens of two or more letters in a row: a function, a connective, words, or variables side by side."""
    if run in _FUNCTIONS:
        return ["\\" + run]
    if run in _RUNS:
        return [_RUNS[run]]
    behind_value = bool(before) and (is_number(before) or before in ("}", ")") or before.startswith(WORDS))
    if len(run) > 3 or (run in _UNITS and behind_value):
        return [WORDS + run.casefold()]
    return list(run)


def _check_nesting(raw: list[str]) -> None:
    depth = 0
    for token in raw:
        depth += _step(token)
        if depth > MAX_NESTING:
            raise TooComplex(f"brackets nested deeper than {MAX_NESTING}")


def _sequence(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    """Tokens up to the brace that closes, or the end, with every argument in braces."""
    tokens: list[str] = []
    while start < len(raw) and raw[start] != "}":
        piece, start = _piece(raw, start, depth)
        tokens += piece
    return tokens, start


def _piece(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    """One token with its arguments, or one group in braces."""
    if depth > 2 * MAX_NESTING:  # A braced argument counts twice: as an argument and as a group.
        raise TooComplex(f"arguments nested deeper than {MAX_NESTING}")
    token = raw[start]
    if token == "{":
        inner, end = _group(raw, start, depth)
        return (inner if len(inner) == 1 else ["{", *inner, "}"]), end
    tokens = [token]
    start += 1
    if token == "\\sqrt" and raw[start : start + 1] == ["["] and "]" in raw[start:]:
        end = raw.index("]", start) + 1
        tokens += raw[start:end]
        start = end
    for _ in range(_ARGUMENTS.get(token, 0)):
        argument, start = _argument(raw, start, depth + 1, whole=token in "^_")
        tokens += ["{", *argument, "}"]
    return tokens, start


def _group(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    inner, end = _sequence(raw, start + 1, depth + 1)
    if end == len(raw):
        raise Unreadable("a brace is not closed")
    return inner, end + 1


def _argument(raw: list[str], start: int, depth: int, whole: bool) -> tuple[list[str], int]:
    r"""The argument that starts here, without braces. TeX takes one digit (`\frac43`), people write `2^10`."""
    if start >= len(raw) or raw[start] == "}":
        raise Unreadable("an argument is missing")
    token = raw[start]
    if token == "{":
        return _group(raw, start, depth)
    if whole and token in ("+", "-"):
        piece, end = _argument(raw, start + 1, depth + 1, whole)
        return [token, *piece], end
    if is_number(token) and len(token) > 1 and not whole:
        raw[start : start + 1] = [token[0], token[1:]]
    return _piece(raw, start, depth)


def _joined_words(tokens: list[str]) -> list[str]:
    """Words in a row as one token; `^{\\degree}` as `\\degree`."""
    joined: list[str] = []
    for token in tokens:
        if token.startswith(WORDS) and joined and joined[-1].startswith(WORDS):
            joined[-1] += " " + token[1:]
        elif token == "}" and joined[-3:] == ["^", "{", "\\degree"]:
            joined[-3:] = ["\\degree"]
        else:
            joined.append(token)
    return joined


def _trimmed(tokens: list[str]) -> Tokens:
    """Without the punctuation that ends a sentence, a plus in front, and braces around everything."""
    while tokens and tokens[-1] in (".", ",", ":", "\\\\", "`"):
        tokens.pop()
    while tokens and tokens[0] in ("+", ":", ",", "`"):
        tokens.pop(0)
    found = tuple(tokens)
    while found[:1] == ("{",) and closes_at(found, 0) == len(found) - 1:
        found = found[1:-1]
    return found
