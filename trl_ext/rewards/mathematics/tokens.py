r"""Split a short mathematical text into tokens, with one spelling for each meaning.

`\dfrac12`, `\tfrac{1}{2}` and `\frac {1} {2}` give the same tokens, and so do `10{,}000` and `10,000`, `\left( 1` and
`(1`, `x^2` and `x^{2}`, `\text{East}` and `east`. Spaces separate tokens and are dropped, so `1 1/2` never becomes
`11/2`. A token is a LaTeX command, a number, one letter, one character, or words after a `"`.

Only ASCII, full-width ASCII and the signs of `spelling` are understood. Other digits (Arabic, bold, circled) and
invisible characters are left unchanged, and no number is read from them.

An answer above the sizes of this file is not judged. They are sizes, not times, so that slow and fast machines
give the same verdict.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

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

_ACCENTS = ("\\bar", "\\hat", "\\vec", "\\tilde", "\\widehat", "\\underline", "\\overline")
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, **dict.fromkeys(("\\sqrt", "\\surd", "^", "_", *_ACCENTS), 1)}
_WHOLE = frozenset({"^", "_", "\\surd"})  # These commands take a number of many digits as one argument.
_BRACKETED = _WHOLE | {"\\sqrt"}  # These take an expression in round brackets, as people type `x^(n+1)`.
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)
_LAST = frozenset({".", ",", ":", "\\\\", "`"})  # punctuation at the end of a sentence
_FIRST = frozenset({"+", ":", ",", "`", "="})
_STEPS = {**dict.fromkeys(OPENING, 1), **dict.fromkeys(CLOSING, -1)}
_ENVIRONMENTS = {"\\begi": 1, "\\end{": -1}


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
    if max(accumulate(map(_step, raw)), default=0) > MAX_NESTING:
        raise TooComplex(f"brackets nested deeper than {MAX_NESTING}")
    try:
        tokens = _merge_words(_Arguments(raw).all())
    except RecursionError:  # Only where the caller's own stack is nearly full.
        raise TooComplex("brackets nested too deeply") from None
    while tokens and tokens[-1] in _LAST:
        tokens.pop()
    while len(tokens) > 1 and tokens[0] in _FIRST:
        tokens.pop(0)
    found = tuple(tokens)
    while found[:1] == ("{",) and closes_at(found, 0) == len(found) - 1:
        found = found[1:-1]
    return found


def split(tokens: Tokens, marks: Collection[str]) -> list[tuple[str, Tokens]]:
    """Split at marks outside all brackets; return each part with the mark before it ("" for the first)."""
    if {*marks}.isdisjoint(tokens):
        return [("", tokens)]
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
    depths = accumulate(map(_step, tokens[start:]))
    return next((place for place, depth in enumerate(depths, start) if depth == 0), -1)


def text_of(tokens: Tokens) -> str:
    """Return tokens with spaces between them, and `~` for spaces within words, for patterns over tokens."""
    return "\n".join(tokens).replace(" ", "~").replace("\n", " ")


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
        return token[1:] in GREEK
    letter = token[1:] if token[0] == WORDS else token
    return len(letter) == 1 and letter.isascii() and letter.isalpha()


def _step(token: str) -> int:
    """Return the change of a token to the depth of brackets: 1, 0 or -1."""
    return _STEPS.get(token) or _ENVIRONMENTS.get(token[:5], 0)


class _Arguments:
    """Reads tokens, and puts each argument of a command in braces."""

    def __init__(self, raw: list[str], depth: int = 0) -> None:
        self.raw = raw
        self.position = 0
        self.depth = depth

    def all(self) -> list[str]:
        tokens = self.sequence()
        if self.position < len(self.raw):
            raise Unreadable("a brace closes that was never opened")
        return tokens

    def sequence(self) -> list[str]:
        """Read up to a closing brace or the end."""
        tokens: list[str] = []
        while self.raw[self.position : self.position + 1] not in ([], ["}"]):
            tokens += self.piece()
        return tokens

    def piece(self) -> list[str]:
        """Read one token with its arguments, or one group in braces."""
        token = self.raw[self.position]
        self.position += 1
        if token == "{":
            inner = self.group()
            return inner if len(inner) == 1 else ["{", *inner, "}"]
        tokens = ["\\sqrt" if token == "\\surd" else token]
        rest = self.raw[self.position :]
        if tokens == ["\\sqrt"] and rest[:1] == ["["] and "]" in rest:  # the degree of a root
            tokens += rest[: rest.index("]") + 1]
            self.position += len(tokens) - 1
        for _ in range(_ARGUMENTS.get(token, 0)):
            tokens += ["{", *self.argument(token), "}"]
        return tokens

    def group(self) -> list[str]:
        inner = self.sequence()
        if self.position == len(self.raw):
            raise Unreadable("a brace is not closed")
        self.position += 1
        return inner

    def argument(self, command: str) -> list[str]:
        r"""Read an argument, without its braces: TeX takes one digit (`\frac43`), but people write `2^10`."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise TooComplex(f"arguments nested deeper than {MAX_NESTING}")
        tokens = self._argument(command, "".join(self.raw[self.position : self.position + 1]))
        self.depth -= 1
        return tokens

    def _argument(self, command: str, token: str) -> list[str]:
        if token in ("", "}"):
            raise Unreadable("an argument is missing")
        if token == "(" and command in _BRACKETED:
            end = closes_at(self.raw, self.position)
            if end < 0 or self.raw[end] != ")":
                raise Unreadable("'(' is not closed")
            inner = _Arguments(self.raw[self.position + 1 : end], self.depth).all()
            self.position = end + 1
            return inner
        if token in ("+", "-") and command in _WHOLE:
            self.position += 1
            return [token, *self.argument(command)]
        if is_number(token) and len(token) > 1 and command not in _WHOLE:
            self.raw[self.position : self.position + 1] = [token[0], token[1:]]
        piece = self.piece()
        return piece[1:-1] if token == "{" and len(piece) != 1 else piece


def _merge_words(tokens: list[str]) -> list[str]:
    """Join words in a row into one token."""
    joined: list[str] = []
    for token in tokens:
        if token.startswith(WORDS) and joined and joined[-1].startswith(WORDS):
            joined[-1] += " " + token[1:]
        else:
            joined.append(token)
    return joined
