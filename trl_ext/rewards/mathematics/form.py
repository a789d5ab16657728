r"""Find the kind of an answer: a list, tuple, set, union, matrix, relation, words, or one expression.

list      1, -2      1 and -2      1 \pm 2          in any order, as a set
set       \{1, 2\}                                  in any order
tuple     (1, 2)   [1, 2)   \langle 1, 2 \rangle    in order; the brackets belong to it, so intervals are tuples
union     (0, 1) \cup [2, 3)                        in any order
matrix    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
relation  x = 5   1 < x \leq 2   y = 2x + 3
ratio     5 : 8
numeral   52_8   (1A)_{16}                          the same digits of the same base
words     \text{east}
scalar    everything else, an expression of `parse`
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from trl_ext.rewards.mathematics.spelling import WORDS, is_number
from trl_ext.rewards.mathematics.tokens import MAX_MATRIX, MAX_PARTS, Tokens, TooComplex, closes_at, is_symbol, split

SET_RELATIONS = {"\\subset": "\\supset", "\\subseteq": "\\supseteq", "\\subsetneq": "\\supsetneq"}
RELATIONS = frozenset({"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\approx", *SET_RELATIONS, *SET_RELATIONS.values()})
ACCENTS = frozenset({"\\bar", "\\hat", "\\vec", "\\tilde", "\\widehat", "\\underline", "\\overline"})
_AROUND_POINTS = frozenset({"|", "\\angle", "\\overline", "\\triangle", "_", "{", "}", "\\cap", "\\complement"})
_FILLING = re.compile(r"\bis an?\b|\b(?:the|is|are|it|must be)\b|[.!,]")
_IF = frozenset({WORDS + "if", WORDS + "when", WORDS + "for", "."})
_OPENS = (WORDS + "for", WORDS + "where", "\\forall")
_OPERATORS = RELATIONS | {"\\cdot"}  # An answer that starts with such a sign is text.
_TUPLES = {"(": (")", "]"), "[": (")", "]"), "\\langle": ("\\rangle",)}
_HIGH_DIGITS = frozenset("ABCDEF")
_MAX_SIGNS = 3  # plus-minus signs of one expression, so eight values
# The domain of a parameter: `k \in \mathbb{Z}`, `\text{ for all positive integers } n`.
_DOMAIN_WORDS = frozenset(
    "for all any every each some where is an a arbitrary real reals number numbers integer integers natural rational"
    " positive negative nonnegative non-negative nonzero whole even odd constant".split()
)
_DOMAIN_SIGNS = frozenset(("\\in", "\\neq", ">", "<", "\\geq", "_", "^", "{", "}", "+", "*", "\\cdot", "0", "1"))
# Words that deny an answer do not name it.
_NO_NAME = frozenset("not no never wrong false incorrect except neither nor but".split())
_MATRICES = frozenset(f"\\begin{{{name}}}" for name in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"))


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of an answer; `signs` are brackets, relation signs, lengths of rows, or a numeral's digits and base."""

    kind: str
    tokens: Tokens
    signs: tuple[str, ...] = ()
    parts: tuple[Tokens, ...] = ()


@lru_cache(maxsize=4096)  # The completions of a group share their gold, and often their answers.
def form_of(tokens: Tokens) -> Form:
    """Return the form of an answer; raise TooComplex for too many parts."""
    tokens = tokens[1:] if tokens[:1] in (("+",), ("\\approx",), (WORDS + "only",)) else tokens
    if tokens[1:2] == ("|",) and (condition := _builder(tokens)):  # `x | x > 1`, whose braces are lost
        return condition
    listed = [part for _, part in split(tokens, (",",))]
    if len(listed) > 1:
        listed = [part for part in listed if part and (part[0] == "\\forall" or not _is_domain(part))]
        if len(listed) > 1:
            return _form("list", tokens, (), _expand(listed))
        tokens = listed[0] if listed else tokens
    places = (place for place, token in enumerate(tokens) if place and token.startswith((*_OPENS, "(")))
    tokens = tokens[: next((place for place in places if _is_domain(tokens[place:])), None)]
    if "\\in" in tokens:
        place = tokens.index("\\in")
        if is_variable(tokens[:place]):  # `x \in [1, 2)` is the interval.
            tokens = tokens[place + 1 :]
    for kind, marks in (("union", ("\\cup",)), ("relation", RELATIONS)):
        parts = split(tokens, marks)
        if len(parts) > 1 and any(part for _, part in parts):
            return _form(kind, tokens, tuple(mark for mark, _ in parts[1:]), tuple(part for _, part in parts))
    return (
        _ratio(tokens)
        or _numeral(tokens)
        or _bracketed(tokens)
        or _labelled(tokens)
        or _matrix(tokens)
        or _cases(tokens)
        or _plus_minus(tokens)
        or _plain(tokens)
    )


def is_variable(tokens: Tokens) -> bool:
    """Return True if tokens are an unknown: `x`, `x_1`, `f(x)`, `f'(x)`, `\\bar{x}`, `(x, y)`."""
    if not tokens:
        return False
    if tokens[0] == "(" and closes_at(tokens, 0) == len(tokens) - 1:
        return all(is_variable(part) for _, part in split(tokens[1:-1], (",",)))
    if tokens[0] in ACCENTS and closes_at(tokens, 1) == len(tokens) - 1:
        return is_variable(tokens[2:-1])
    if not is_symbol(tokens[0]) or tokens[0] in ("e", "i"):
        return False
    rest = tokens[1:]
    if rest[:1] == ("_",):
        rest = rest[closes_at(rest, 1) + 1 :]
    while rest[:1] == ("'",):
        rest = rest[1:]
    return not rest or (rest[0] == "(" and closes_at(rest, 0) == len(rest) - 1 and all(map(is_symbol, rest[1:-1:2])))


def is_name(tokens: Tokens) -> bool:
    """Return True if tokens name a quantity: an unknown, `|AB|`, `P(X = 2)`, `V_1:V_2`, `\\frac{NO}{BO}`, words."""
    if is_variable(tokens) or (tokens[-4:-2] == ("_", "{") and tokens[-2][1:] in ("max", "min")):
        return True
    if len(tokens) == 1 and tokens[0].startswith(WORDS):
        return not _NO_NAME & {*tokens[0][1:].split()}
    ratio = [part for _, part in split(tokens, (":",))]
    if len(ratio) > 1:
        return all(is_name(part) for part in ratio)
    if tokens[:2] == ("\\frac", "{"):
        middle = closes_at(tokens, 1)
        return is_name(tokens[2:middle]) and is_name(tokens[middle + 2 : -1])
    bare = tuple(token for token in tokens if token not in _AROUND_POINTS and not token.isdigit())
    if len(bare) > 1 and all(len(token) == 1 and token.isupper() for token in bare):
        return True  # points
    if len(tokens) > 3 and is_symbol(tokens[0]) and tokens[0] not in ("x", "y", "z") and tokens[1] == "(":
        return closes_at(tokens, 1) == len(tokens) - 1 and (tokens[0] == "P" or not RELATIONS & {*tokens})
    return False


def words_of(tokens: Tokens) -> str | None:
    """Return the words that tokens spell, in lower case without spaces; None if a token is not a letter or word."""
    if not all(token.startswith(WORDS) or (len(token) == 1 and token.isalpha()) for token in tokens):
        return None
    text = "".join(token.removeprefix(WORDS) for token in tokens)
    return "".join(text.split()).casefold() or None


def _is_domain(tokens: Tokens) -> bool:
    """Return True if all tokens give the domain of a parameter."""
    if tokens[:1] == ("(",) and closes_at(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    if len(tokens) > 2 and is_symbol(tokens[0]) and tokens[1] == "\\in":
        return tokens[2].startswith("\\mathbb")
    if not tokens or tokens[0].split()[0] not in _OPENS:
        return False
    words = [token for token in tokens if token.startswith(WORDS) and len(token) > 2]
    signs = (token for token in tokens if not token.startswith(WORDS))
    return all({*token[1:].split()} <= _DOMAIN_WORDS for token in words) and all(
        token in _DOMAIN_SIGNS or token.startswith(("\\mathbb", "\\forall")) or is_symbol(token) for token in signs
    )


def _ratio(tokens: Tokens) -> Form | None:
    """Read `5 : 8` as a ratio and `Alice : 5` as a relation; None for anything else."""
    parts = tuple(part for _, part in split(tokens, (":",))) if ":" in tokens else ()
    if len(parts) == 2 and parts[0][:1] and parts[0][0].startswith(WORDS) and is_name(parts[0]):
        return Form("relation", tokens, ("=",), parts)
    if len(parts) < 2 or not all(parts) or any(token.startswith(WORDS) for token in tokens):
        return None
    return _form("ratio", tokens, (), parts)


def _expand(parts: Sequence[Tokens]) -> tuple[Tokens, ...]:
    r"""Return the parts of a list or set, with `1 \pm 2` as two parts."""
    found: list[Tokens] = []
    for part in parts:
        signs = _plus_minus(part) or (_bracketed(part) if "\\pm" in part else None)
        found.extend(signs.parts if signs and signs.kind == "list" else [part])
    return tuple(found)


def _numeral(tokens: Tokens) -> Form | None:
    """Read digits that are followed by their base, or a residue class; None for anything else."""
    value, base = tokens[-3:-2], tokens[-1:]
    if tokens[-2:-1] == ("\\pmod",) and value and tokens[:-3] in ((), ("-",)):
        if all(one.isdecimal() and len(one) < 10 for one in (*value, *base)) and int(base[0]):
            return Form("numeral", tokens, (str(int("".join(tokens[:-2])) % int(base[0])), "mod " + base[0]))
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
    parts = tuple(part for _, part in split(inner, (",",)))
    if (opening == "\\{" and closing == "\\}") or (opening == "{" and (len(parts) > 1 or inner[1:2] == ("|",))):
        if not inner:
            return Form("words", ("\\emptyset",))
        return _builder(inner) or _form("set", tokens, (), _expand(parts))
    if (opening, closing) == ("(", ")") and len(parts) == 1 and RELATIONS & {*inner}:
        return form_of(inner)
    if closing in _TUPLES.get(opening, ()) and len(parts) > 1:
        if "\\pm" in inner:
            return _form("list", tokens, (), tuple((opening, *one, closing) for one in _signed(inner)))
        return _form("tuple", tokens, (opening, closing), parts)
    return None


def _labelled(tokens: Tokens) -> Form | None:
    """Read the point `A(1, 2)` as the relation `A = (1, 2)`; None for anything else, such as `F(x, y)`."""
    place = tokens.index("(") if "(" in tokens else 0
    if not place or not tokens[0].isupper() or not is_variable(tokens[:place]):
        return None
    point = _bracketed(tokens[place:])
    if point is None or not point.parts or all(map(is_variable, point.parts)):
        return None
    return Form("relation", tokens, ("=",), (tokens[:place], tokens[place:]))


def _builder(inner: Tokens) -> Form | None:
    r"""Read the inside of `\{x | 1 < x < 2\}` as the relation; None without a variable and a bar."""
    place = next((place for place, token in enumerate(inner) if token in ("|", ":")), 0)
    variable = inner[: inner.index("\\in")] if "\\in" in inner[:place] else inner[:place]
    condition = form_of(inner[place + 1 :]) if is_variable(variable) else None
    return condition if condition and condition.kind in ("relation", "list") else None


def _matrix(tokens: Tokens) -> Form | None:
    """Read a matrix by rows, its signs the lengths of rows; None for anything else, such as a determinant."""
    if (
        len(tokens) > 2
        and tokens[0] in ("(", "[")
        and tokens[1] in _MATRICES
        and closes_at(tokens, 0) == len(tokens) - 1
    ):
        tokens = tokens[1:-1]
    if not tokens or tokens[0] not in _MATRICES or closes_at(tokens, 0) != len(tokens) - 1:
        return None
    rows = [[cell for _, cell in split(row, ("&",))] for _, row in split(tokens[1:-1], ("\\\\",)) if row]
    if len(rows) > MAX_MATRIX or any(len(row) > MAX_MATRIX for row in rows):
        raise TooComplex(f"a matrix of more than {MAX_MATRIX} rows or columns")
    shape = tuple(str(len(row)) for row in rows)
    return Form("matrix", tokens, shape, tuple(cell for row in rows for cell in row))


def _cases(tokens: Tokens) -> Form | None:
    """Read a piecewise function as pairs of value and condition, and a system as a list of relations."""
    if tokens[:1] != ("\\begin{cases}",) or closes_at(tokens, 0) != len(tokens) - 1:
        return None
    inner = ["," if token == "&" else token for token in tokens[1:-1] if token not in _IF]
    pairs = pairwise((*inner, "\\\\"))
    rows = split(tuple(one for one, after in pairs if one != "," or after not in (",", "\\\\")), ("\\\\",))
    return _form("list", tokens, (), tuple(("(", *row, ")") for _, row in rows if row))


def _plus_minus(tokens: Tokens) -> Form | None:
    r"""Read `1 \pm 2` as a list of its values; None for anything else."""
    values = _signed(tokens) if "\\pm" in tokens or "\\mp" in tokens else ()
    return Form("list", tokens, (), values) if len(values) > 1 else None


def _signed(tokens: Tokens) -> tuple[Tokens, ...]:
    r"""Return the tokens with each choice of plus-minus signs; with a `\mp`, all signs change together."""
    places = [place for place, token in enumerate(tokens) if token in ("\\pm", "\\mp")]
    if len(places) > _MAX_SIGNS:
        return (tokens,)
    free = 1 if "\\mp" in tokens else len(places)
    found = []
    for choice in product("+-", repeat=free):
        signs = choice * (len(places) if free == 1 else 1)
        one = list(tokens)
        for place, sign in zip(places, signs, strict=False):
            one[place] = sign if tokens[place] == "\\pm" else "-+"["+-".index(sign)]
        found.append(tuple(one))
    return tuple(found)


def _plain(tokens: Tokens) -> Form:
    """Read words or a scalar. Three letters in a row are a word, because a product would equal its anagrams."""
    content = tuple(_FILLING.sub(" ", token) if token.startswith(WORDS) else token for token in tokens)
    pairs = tuple(zip(tokens[::2], tokens[1::2], strict=False))
    if len(pairs) > 1 and len(tokens) % 2 == 0 and all(is_number(a) and b.startswith(WORDS) for a, b in pairs):
        return Form("list", tokens, (), pairs)  # `2 hours 12 minutes`
    is_set = len(tokens) == 1 and tokens[0].startswith(("\\mathbb", "\\emptyset"))
    if is_set or tokens in (("\\infty",), ("-", "\\infty")) or (tokens and tokens[0] in _OPERATORS):
        return Form("words", tokens)
    if any(token.startswith(WORDS) and len(token) > 2 for token in tokens) and words_of(content):
        return Form("words", content)
    return Form("words" if len(tokens) > 2 and words_of(tokens) else "scalar", tokens)
