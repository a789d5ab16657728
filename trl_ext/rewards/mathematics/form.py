r"""Tell what kind of answer a text is: a list, tuple, set, union, matrix, relation, words, or one expression.

list      1, -2      1 and -2      1 \pm 2          in any order, as a set
set       \{1, 2\}                                  in any order
tuple     (1, 2)   [1, 2)   \langle 1, 2 \rangle    in order; the brackets belong to it, so intervals are tuples
union     (0, 1) \cup [2, 3)                        in any order
matrix    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
relation  x = 5   1 < x \leq 2   y = 2x + 3
numeral   52_8   (1A)_{16}                          the same digits of the same base
words     \text{east}
scalar    everything else, an expression of `parse`
"""

from dataclasses import dataclass

from trl_ext.rewards.mathematics.bounds import MAX_MATRIX, MAX_PARTS, TooComplex
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, closes_at, is_number, is_symbol, split

RELATIONS = frozenset({"=", "<", ">", "\\leq", "\\geq", "\\neq"})
_COMMA = frozenset({","})
_CUP = frozenset({"\\cup"})
_ROWS = frozenset({"\\\\"})
_COLUMNS = frozenset({"&"})
_TUPLES = {"(": (")", "]"), "[": (")", "]"), "\\langle": ("\\rangle",)}
_HIGH_DIGITS = frozenset("ABCDEF")
_MATRICES = frozenset(f"\\begin{{{name}}}" for name in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"))


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of an answer and its parts.

    `signs` are its brackets, its relation signs, the lengths of its rows, or a numeral's digits and base.
    """

    kind: str
    tokens: Tokens
    signs: tuple[str, ...] = ()
    parts: tuple[Tokens, ...] = ()


def form_of(tokens: Tokens) -> Form:
    """Return the form of an answer; raise TooComplex for too many parts."""
    tokens = tokens[1:] if tokens[:1] == ("+",) else tokens
    if "\\in" in tokens:
        place = tokens.index("\\in")
        if is_variable(tokens[:place]):  # `x \in [1, 2)` is the interval.
            tokens = tokens[place + 1 :]
    for kind, marks in (("list", _COMMA), ("union", _CUP), ("relation", RELATIONS)):
        parts = split(tokens, marks)
        if len(parts) > 1:
            return _form(kind, tokens, tuple(mark for mark, _ in parts[1:]), tuple(part for _, part in parts))
    return _numeral(tokens) or _bracketed(tokens) or _matrix(tokens) or _plus_minus(tokens) or _plain(tokens)


def is_variable(tokens: Tokens) -> bool:
    """Return True when tokens stand for an unknown: `x`, `x_1`, `f(x)`, `(x, y)`."""
    if not tokens:
        return False
    if tokens[0] == "(" and closes_at(tokens, 0) == len(tokens) - 1:
        return all(is_variable(part) for _, part in split(tokens[1:-1], _COMMA))
    if not is_symbol(tokens[0]) or tokens[0] in ("e", "i"):
        return False
    rest = tokens[1:]
    if rest[:1] == ("_",):
        rest = rest[closes_at(rest, 1) + 1 :]
    return not rest or (rest[0] == "(" and len(rest) == 3 and rest[2] == ")" and is_symbol(rest[1]))


def words_of(tokens: Tokens) -> str | None:
    """Return the words that tokens spell, without case and spaces; None where they hold anything but letters."""
    if not all(token.startswith(WORDS) or (len(token) == 1 and token.isalpha()) for token in tokens):
        return None
    text = "".join(token.removeprefix(WORDS) for token in tokens)
    return "".join(text.split()).casefold() or None


def _numeral(tokens: Tokens) -> Form | None:
    """Read digits with the base of their number behind them; None for anything else."""
    if tokens[-4:-2] != ("_", "{") or tokens[-1] != "}" or not tokens[-2].isdigit():
        return None
    digits = tokens[1:-5] if tokens[0] == "(" and tokens[-5] == ")" else tokens[:-4]
    if not any(map(is_number, digits)) or not all(is_number(one) or one in _HIGH_DIGITS for one in digits):
        return None
    return Form("numeral", tokens, ("".join(digits).lstrip("0"), tokens[-2]))


def _form(kind: str, tokens: Tokens, signs: tuple[str, ...], parts: tuple[Tokens, ...]) -> Form:
    if len(parts) > MAX_PARTS:
        raise TooComplex(f"more than {MAX_PARTS} parts")
    return Form(kind, tokens, signs, parts)


def _bracketed(tokens: Tokens) -> Form | None:
    if len(tokens) < 2 or closes_at(tokens, 0) != len(tokens) - 1:
        return None
    opening, closing, inner = tokens[0], tokens[-1], tokens[1:-1]
    parts = tuple(part for _, part in split(inner, _COMMA))
    if opening == "\\{" and closing == "\\}":
        return _form("set", tokens, (), parts) if inner else Form("words", ("\\emptyset",))
    if closing in _TUPLES.get(opening, ()) and len(parts) > 1:
        return _form("tuple", tokens, (opening, closing), parts)
    return None


def _matrix(tokens: Tokens) -> Form | None:
    """Read a matrix by rows; None for anything else, a determinant too. Its signs keep 1x4 apart from 2x2."""
    if (
        len(tokens) > 2
        and tokens[0] in ("(", "[")
        and tokens[1] in _MATRICES
        and closes_at(tokens, 0) == len(tokens) - 1
    ):
        tokens = tokens[1:-1]
    if not tokens or tokens[0] not in _MATRICES or closes_at(tokens, 0) != len(tokens) - 1:
        return None
    rows = [[cell for _, cell in split(row, _COLUMNS)] for _, row in split(tokens[1:-1], _ROWS) if row]
    if len(rows) > MAX_MATRIX or any(len(row) > MAX_MATRIX for row in rows):
        raise TooComplex(f"a matrix of more than {MAX_MATRIX} rows or columns")
    shape = tuple(str(len(row)) for row in rows)
    return Form("matrix", tokens, shape, tuple(cell for row in rows for cell in row))


def _plus_minus(tokens: Tokens) -> Form | None:
    r"""Read `1 \pm 2` as a list of two expressions; None for anything else."""
    if tokens.count("\\pm") + tokens.count("\\mp") != 1:
        return None
    place = tokens.index("\\pm" if "\\pm" in tokens else "\\mp")
    before, behind = tokens[:place], tokens[place + 1 :]
    return Form("list", tokens, (), ((*before, "+", *behind), (*before, "-", *behind)))


def _plain(tokens: Tokens) -> Form:
    """Read words or a scalar. Three letters side by side are a word, because a product would equal its anagrams."""
    if tokens in (("\\emptyset",), ("\\infty",), ("-", "\\infty")):
        return Form("words", tokens)
    if any(token.startswith(WORDS) and len(token) > 2 for token in tokens) and words_of(tokens):
        return Form("words", tokens)
    return Form("words" if len(tokens) > 2 and words_of(tokens) else "scalar", tokens)
