r"""Split a short mathematical text into tokens, with one spelling for each meaning.

`\dfrac12`, `\tfrac{1}{2}` and `\frac {1} {2}` give the same tokens, and so do `10{,}000` and `10,000`, `\left( 1` and
`(1`, `x^2` and `x^{2}`, `\text{East}` and `east`. Spaces separate tokens and are dropped, so `1 1/2` never becomes
`11/2`. A token is a LaTeX command, a number, one letter, one character, or words after a `"`.

Only ASCII, full-width ASCII and the signs of `spelling` are understood. Other digits (Arabic, bold, circled) and
invisible characters are left unchanged, and no number is read from them.

The sizes above which an answer is not judged stand here. They are sizes, not times, so that slow and fast machines
give the same verdict.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache

from trl_ext.rewards.mathematics.spelling import TOKEN, WORDS, is_number, plain, spelled

MAX_CHARS = 2_000  # of an extracted answer
MAX_GOLD_CHARS = 8_000
MAX_TOKENS = 600  # of an extracted answer
MAX_GOLD_TOKENS = 2_000
MAX_NESTING = 64  # brackets inside brackets
MAX_DIGITS = 2_000  # decimal digits of any number in an answer or its value
MAX_PARTS = 32  # of a list, a set or a union
MAX_MATRIX = 8  # rows and columns

_NOT_EVALUATED = {"\\int": "an integral", "\\iint": "an integral", "\\oint": "an integral", "\\lim": "a limit"}
_NOT_EVALUATED |= {"\\sum": "a sum with a sign", "\\prod": "a product with a sign"}


class TooComplex(Exception):
    """A text would take too long to judge; the message names the part that is too large."""


class Unreadable(Exception):
    """A text is not an expression that this package reads; the message gives the reason."""


Tokens = tuple[str, ...]

OPENING = frozenset({"(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\langle"})
CLOSING = frozenset({")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle"})

_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "\\surd": 1, "^": 1, "_": 1, "\\overline": 1}
_ARGUMENTS |= dict.fromkeys(("\\bar", "\\hat", "\\vec", "\\tilde", "\\widehat", "\\underline"), 1)
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)
_WHOLE = frozenset({"^", "_", "\\surd"})  # These commands take a number of many digits as one argument.
_BASES = {
    WORDS + word: base
    for word, base in zip("two three four five six seven eight nine ten".split(), "23456789", strict=False)
}


@lru_cache(maxsize=1024)  # The completions of a group share their gold, and often their answers.
def tokenize(text: str) -> Tokens:
    r"""Return the tokens of an answer or a gold.

    Raises:
        Unreadable: Braces do not close, or an argument is missing.
        TooComplex: Brackets are nested deeper than MAX_NESTING.

    Example:
        >>> tokenize(r"\dfrac43 \text{ cm}")
        ('\\frac', '{', '4', '}', '{', '3', '}', '"cm')
    """
    raw: list[str] = []
    for match in TOKEN.finditer(plain(text)):
        raw.extend(spelled(match, raw[-1] if raw else ""))
    depth = 0
    for token in raw:
        depth += _step(token)
        if depth > MAX_NESTING:
            raise TooComplex(f"brackets nested deeper than {MAX_NESTING}")
    try:
        tokens, end = _sequence(raw, 0, 0)
    except RecursionError:  # Only where the caller's own stack is nearly full.
        raise TooComplex("brackets nested too deeply") from None
    if end < len(raw):
        raise Unreadable("a brace closes that was never opened")
    tokens = _joined_words(tokens)
    while tokens and tokens[-1] in (".", ",", ":", "\\\\", "`"):  # punctuation at the end of a sentence
        tokens.pop()
    while len(tokens) > 1 and tokens[0] in ("+", ":", ",", "`", "="):
        tokens.pop(0)
    found = tuple(tokens)
    while found[:1] == ("{",) and closes_at(found, 0) == len(found) - 1:
        found = found[1:-1]
    return found


def split(tokens: Tokens, marks: Collection[str]) -> list[tuple[str, Tokens]]:
    """Split at marks outside all brackets; return each part with the mark before it ("" for the first)."""
    parts: list[tuple[str, Tokens]] = []
    mark, start, depth = "", 0, 0
    for position, token in enumerate(tokens):
        depth += _step(token)
        if depth == 0 and token in marks:
            parts.append((mark, tokens[start:position]))
            mark, start = token, position + 1
    return [*parts, (mark, tokens[start:])]


def closes_at(tokens: Sequence[str], start: int) -> int:
    """Return the position of the bracket that closes the one at `start`; -1 if it is not closed.

    Any closing bracket closes, as in the half-open interval `[0, 1)`.
    """
    depth = 0
    for position in range(start, len(tokens)):
        depth += _step(tokens[position])
        if depth == 0:
            return position
    return -1


def check_answer(tokens: Tokens) -> None:
    """Raise TooComplex for an answer that is too large for any comparison."""
    check_length(tokens, MAX_TOKENS)
    for place, token in enumerate(tokens):
        if token in _NOT_EVALUATED:
            raise TooComplex(f"{_NOT_EVALUATED[token]} is not evaluated")
        if token.startswith("\\begin"):
            inside = tokens[place + 1 : closes_at(tokens, place)]
            num_rows = inside.count("\\\\") + 1
            if num_rows > MAX_MATRIX + 1 or inside.count("&") > num_rows * (MAX_MATRIX - 1):
                raise TooComplex(f"a matrix of more than {MAX_MATRIX} rows or columns")


def check_length(tokens: Tokens, limit: int) -> None:
    """Raise TooComplex for too many tokens, and for a number of too many digits."""
    if len(tokens) > limit:
        raise TooComplex(f"more than {limit} symbols")
    if any(is_number(token) and len(token) > MAX_DIGITS for token in tokens):
        raise TooComplex(f"a number of more than {MAX_DIGITS} digits")


def is_symbol(token: str) -> bool:
    """Return True for one variable: a letter, a letter as text, or a Greek letter."""
    if token[0] == "\\":
        return token[1:] in _GREEK
    letter = token[1:] if token[0] == WORDS else token
    return len(letter) == 1 and letter.isascii() and letter.isalpha()


def _step(token: str) -> int:
    """Return the change of a token to the depth of brackets: 1, 0 or -1."""
    if token in OPENING or token.startswith("\\begin"):
        return 1
    return -1 if token in CLOSING or token.startswith("\\end") else 0


def _sequence(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    """Read tokens up to a closing brace or the end, each argument in braces; return them and the next position."""
    tokens: list[str] = []
    while start < len(raw) and raw[start] != "}":
        piece, start = _piece(raw, start, depth)
        tokens += piece
    return tokens, start


def _piece(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    """Read one token with its arguments, or one group in braces; return it and the next position."""
    if depth > 2 * MAX_NESTING:  # A braced argument counts twice: as an argument and as a group.
        raise TooComplex(f"arguments nested deeper than {MAX_NESTING}")
    token = raw[start]
    if token == "{":
        inner, end = _group(raw, start, depth)
        return (inner if len(inner) == 1 else ["{", *inner, "}"]), end
    tokens = ["\\sqrt" if token == "\\surd" else token]
    start += 1
    if token in ("\\sqrt", "\\surd") and raw[start : start + 1] == ["["] and "]" in raw[start:]:
        end = raw.index("]", start) + 1
        tokens += raw[start:end]
        start = end
    for _ in range(_ARGUMENTS.get(token, 0)):
        argument, start = _argument(raw, start, depth + 1, whole=token in _WHOLE, bracketed=token == "\\sqrt")
        tokens += ["{", *argument, "}"]
    return tokens, start


def _group(raw: list[str], start: int, depth: int) -> tuple[list[str], int]:
    inner, end = _sequence(raw, start + 1, depth + 1)
    if end == len(raw):
        raise Unreadable("a brace is not closed")
    return inner, end + 1


def _argument(raw: list[str], start: int, depth: int, whole: bool, bracketed: bool = False) -> tuple[list[str], int]:
    r"""Read the argument at `start`, without its braces.

    TeX takes one digit (`\frac43`). With `whole`, a number of many digits is one argument (people write `2^10`). With
    `whole` or `bracketed`, so is an expression in round brackets.
    """
    if start >= len(raw) or raw[start] == "}":
        raise Unreadable("an argument is missing")
    token = raw[start]
    if token == "{":
        return _group(raw, start, depth)
    if whole and token in ("+", "-"):
        piece, end = _argument(raw, start + 1, depth + 1, whole)
        return [token, *piece], end
    if (whole or bracketed) and token == "(":  # `x^(n+1)`, `\sqrt(3)`, as people type it
        end = closes_at(raw, start)
        if end < 0 or raw[end] != ")":
            raise Unreadable("'(' is not closed")
        inner, used = _sequence(raw[start + 1 : end], 0, depth + 1)
        if used < end - start - 1:
            raise Unreadable("a brace closes that was never opened")
        return inner, end + 1
    if is_number(token) and len(token) > 1 and not whole:
        raw[start : start + 1] = [token[0], token[1:]]
    return _piece(raw, start, depth)


def _joined_words(tokens: list[str]) -> list[str]:
    """Join words in a row into one token; write `^{\\degree}` as `\\degree` and the base of a numeral in digits."""
    joined: list[str] = []
    for token in tokens:
        if token.startswith(WORDS) and joined and joined[-1].startswith(WORDS):
            joined[-1] += " " + token[1:]
        elif joined[-2:] == ["_", "{"] and token in _BASES:
            joined.append(_BASES[token])
        elif token == "}" and joined[-3:] == ["^", "{", "\\degree"]:
            joined[-3:] = ["\\degree"]
        elif token == "}" and joined[-1:] == ["\\prime"]:
            primes = 1
            while joined[-primes - 1] == "\\prime":
                primes += 1
            is_raised = joined[-primes - 2 : -primes] == ["^", "{"]
            joined[-primes - 2 if is_raised else len(joined) :] = ["'"] * primes if is_raised else [token]
        else:
            joined.append(token)
    return joined
