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

Names, domains, numerals and words are recognised by patterns over the tokens with spaces between them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from trl_ext.rewards.mathematics.spelling import WORDS
from trl_ext.rewards.mathematics.tokens import GREEK, MAX_PARTS, Tokens, TooComplex, closes_at, split, text_of

SET_RELATIONS = {"\\subset": "\\supset", "\\subseteq": "\\supseteq", "\\subsetneq": "\\supsetneq"}
RELATIONS = frozenset({"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\approx", *SET_RELATIONS, *SET_RELATIONS.values()})
_LEADS = frozenset({"+", "\\approx", WORDS + "only"})
_FILLING = re.compile(r"\bis an?\b|\b(?:the|is|are|it|must be)\b|[.!,]")
_IF = frozenset({WORDS + "if", WORDS + "when", WORDS + "for", "."})
_TUPLES = {"(": (")", "]"), "[": (")", "]"), "\\langle": ("\\rangle",)}
_OPENS = (WORDS + "for", WORDS + "where", "\\forall", "(")
_MAX_SIGNS = 3  # plus-minus signs of one expression, so eight values
_MATRICES = frozenset(f"\\begin{{{name}}}" for name in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"))
_TOGETHER = ({"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"})

# Patterns over text_of tokens.
_RELATION = "(?:" + "|".join(map(re.escape, sorted(RELATIONS))) + ")"
_LETTER = rf"(?:\"?[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))}))(?= |\Z)"
_UNKNOWN = rf"(?![ei](?: |\Z)){_LETTER}(?: _ \{{ (?:[^{{}}]+ )?\}})?(?: ')*(?: \( {_LETTER}(?: \S {_LETTER})* \))?"
_ACCENTED = rf"\\(?:bar|hat|vec|tilde|widehat|underline|overline) \{{ {_UNKNOWN} \}}"
_VARIABLE = re.compile(rf"(?:{_UNKNOWN}|{_ACCENTED}|\( {_UNKNOWN}(?: , {_UNKNOWN})* \))")
_AROUND = r"(?:[|_{}]|\\(?:angle|overline|triangle|cap|complement)|[0-9]+)"
_POINTS = rf"(?:{_AROUND} )*[A-Z](?: {_AROUND})* [A-Z](?: {_AROUND}| [A-Z])*"
_NO_NAME = "not|no|never|wrong|false|incorrect|except|neither|nor|but"  # Words that deny an answer do not name it.
_ONE_NAME = rf"(?:{_UNKNOWN}|{_ACCENTED}|{_POINTS}|\"(?!\S*\b(?:{_NO_NAME})\b)\S+)"
_NAME = re.compile(
    rf"{_VARIABLE.pattern}|{_ONE_NAME}(?: : {_ONE_NAME})*|\\frac \{{ {_ONE_NAME} \}} \{{ {_ONE_NAME} \}}"
    r"|.+ _ \{ [\"\\](?:max|min) \}"
    rf"|P \( [^()]+ \)|(?![xyz] ){_LETTER} \( (?!.*{_RELATION} )(?:[^()]|\( [^()]* \))+ \)"
)
_DOMAIN_WORDS = (
    "for|all|any|every|each|some|where|is|an|a|arbitrary|reals?|numbers?|integers?|natural|rational|positive|negative"
    "|non-?negative|non-?positive|nonzero|whole|even|odd|constant"
)
_IN_DOMAIN = (
    rf"(?:\"(?:(?:{_DOMAIN_WORDS})(?:~|(?= |\Z)))+|{_LETTER}|\\in|\\neq|\\geq|\\cdot|[<>_^{{}}+*01]"
    r"|\\mathbb\S*|\\forall)"
)
# The domain of a parameter: `k \in \mathbb{Z}`, `\text{ for all positive integers } n`.
_DOMAIN = re.compile(
    rf"(?:\( )?(?:{_LETTER} \\in \\mathbb.*|(?=\"(?:for|where)\b|\\forall){_IN_DOMAIN}(?: {_IN_DOMAIN})*?)(?: \))?"
)
_ARITHMETIC = re.compile(r"(?:(?:\.?[0-9][0-9.]*|[-+/^{}]|\\(?:frac|cdot|sqrt|pi))(?: |\Z))*")
_RESIDUE = re.compile(r"(-?) ?([0-9]{1,9}) \\pmod ([1-9][0-9]{0,8})")
_NUMERAL = re.compile(r"(?:\( )?(?=[^_]*[0-9])((?:[0-9.]+|[A-F])(?: [0-9.]+| [A-F])*)(?: \))? _ \{ ([0-9]+) \}")
_AMOUNTS = re.compile(r"[0-9.]+ \"\S+(?: [0-9.]+ \"\S+)+")  # `2 hours 12 minutes`
_TEXT = re.compile(rf"\\mathbb\S*|\\emptyset|(?:- )?\\infty|(?:{_RELATION}|\\cdot)(?: .*)?")


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of an answer; `signs` are brackets, relation signs, lengths of rows, or a numeral's digits and base."""

    kind: str
    tokens: Tokens
    signs: tuple[str, ...] = ()
    parts: tuple[Tokens, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parts) > MAX_PARTS and self.kind != "matrix":
            raise TooComplex(f"more than {MAX_PARTS} parts")


@lru_cache(maxsize=4096)  # The completions of a group share their gold, and often their answers.
def form_of(tokens: Tokens) -> Form:
    """Return the form of an answer by the first of `_READERS` that knows it; raise TooComplex for too many parts."""
    tokens = tokens[1:] if _LEADS & {*tokens[:1]} else tokens
    for read in _READERS:
        form = read(tokens)
        if form is not None:
            return form
    return Form("scalar", tokens)


def is_variable(tokens: Tokens) -> bool:
    """Return True if tokens are an unknown: `x`, `x_1`, `f(x)`, `f'(x)`, `\\bar{x}`, `(x, y)`."""
    return _VARIABLE.fullmatch(text_of(tokens)) is not None


def is_name(tokens: Tokens) -> bool:
    """Return True if tokens name a quantity: an unknown, `|AB|`, `P(X = 2)`, `V_1:V_2`, `\\frac{NO}{BO}`, words."""
    return _NAME.fullmatch(text_of(tokens)) is not None


def words_of(tokens: Tokens) -> str | None:
    """Return the words that tokens spell, in lower case without spaces; None if a token is not a letter or word."""
    if not all(token.startswith(WORDS) or (len(token) == 1 and token.isalpha()) for token in tokens):
        return None
    text = "".join(token.removeprefix(WORDS) for token in tokens)
    return "".join(text.split()).casefold() or None


def _between(tokens: Tokens, *signs: str) -> tuple[Tokens, ...]:
    """Return the parts between these signs outside of brackets."""
    return tuple(part for _, part in split(tokens, signs))


def _is_enclosed(tokens: Tokens) -> bool:
    """Return True if the first bracket closes at the end."""
    return len(tokens) > 1 and closes_at(tokens, 0) == len(tokens) - 1


def _is_domain(tokens: Tokens) -> bool:
    return _DOMAIN.fullmatch(text_of(tokens)) is not None


# Readers, each of which returns None for what it does not read. ----------------------------------------------------


def _arithmetic(tokens: Tokens) -> Form | None:
    """Read arithmetic of numbers, which is most answers, before all other patterns are tried; also no tokens."""
    return Form("scalar", tokens) if _ARITHMETIC.fullmatch(text_of(tokens)) else None


def _builder(tokens: Tokens) -> Form | None:
    r"""Read `x | 1 < x < 2`, in the braces of a set or without them, as the relation."""
    place = next((place for place, token in enumerate(tokens) if token in ("|", ":")), 0)
    variable = tokens[: tokens.index("\\in")] if "\\in" in tokens[:place] else tokens[:place]
    condition = form_of(tokens[place + 1 :]) if is_variable(variable) else None
    return condition if condition and condition.kind in ("relation", "list") else None


def _list(tokens: Tokens) -> Form | None:
    parts = _between(tokens, ",")
    if len(parts) < 2:
        return None
    parts = tuple(part for part in parts if part and not (_is_domain(part) and part[0] != "\\forall"))
    if len(parts) > 1:
        return Form("list", tokens, (), _expand(parts))
    return form_of(parts[0]) if parts else None


def _without_domain(tokens: Tokens) -> Form | None:
    """Read an answer without the domain of its parameter, and the interval of `x \\in [1, 2)`."""
    starts = (place for place, token in enumerate(tokens) if place and token.startswith(_OPENS))
    place = next((place for place in starts if _is_domain(tokens[place:])), 0)
    if place:
        return form_of(tokens[:place])
    place = tokens.index("\\in") if "\\in" in tokens else 0
    return form_of(tokens[place + 1 :]) if place and is_variable(tokens[:place]) else None


def _reader(kind: str, marks: frozenset[str]) -> Callable[[Tokens], Form | None]:
    """Return a reader of parts with marks between them."""

    def read(tokens: Tokens) -> Form | None:
        found = split(tokens, marks)
        if len(found) == 1 or not any(part for _, part in found):
            return None
        return Form(kind, tokens, tuple(mark for mark, _ in found[1:]), tuple(part for _, part in found))

    return read


def _ratio(tokens: Tokens) -> Form | None:
    """Read `5 : 8` as a ratio and `Alice : 5` as a relation."""
    parts = _between(tokens, ":")
    if len(parts) < 2 or not all(parts):
        return None
    if len(parts) == 2 and parts[0][0].startswith(WORDS) and is_name(parts[0]):
        return Form("relation", tokens, ("=",), parts)
    has_words = any(token.startswith(WORDS) for token in tokens)
    return None if has_words else Form("ratio", tokens, (), parts)


def _numeral(tokens: Tokens) -> Form | None:
    """Read digits that are followed by their base, or a residue class."""
    text = text_of(tokens)
    if found := _RESIDUE.fullmatch(text):
        return Form("numeral", tokens, (str(int(found[1] + found[2]) % int(found[3])), "mod " + found[3]))
    found = _NUMERAL.fullmatch(text)
    return Form("numeral", tokens, (found[1].replace(" ", "").lstrip("0"), found[2])) if found else None


def _bracketed(tokens: Tokens) -> Form | None:
    if not _is_enclosed(tokens):
        return None
    opening, inner, closing = tokens[0], tokens[1:-1], tokens[-1]
    parts = _between(inner, ",")
    if closing in ("\\}", "}") and opening in ("\\{", "{"):
        return _set(tokens, inner, parts)
    if closing == ")" and len(parts) == 1 and RELATIONS & {*inner}:
        return form_of(inner)
    if closing not in _TUPLES.get(opening, ()) or len(parts) == 1:
        return None
    if "\\pm" in inner:
        return Form("list", tokens, (), tuple((opening, *one, closing) for one in _each_sign(inner)))
    return Form("tuple", tokens, (opening, closing), parts)


def _set(tokens: Tokens, inner: Tokens, parts: tuple[Tokens, ...]) -> Form | None:
    if not inner:
        return Form("words", ("\\emptyset",))
    is_set = tokens[0] == "\\{" or len(parts) > 1 or inner[1:2] == ("|",)
    return _builder(inner) or Form("set", tokens, (), _expand(parts)) if is_set else None


def _point(tokens: Tokens) -> Form | None:
    """Read the point `A(1, 2)` as the relation `A = (1, 2)`, but not `F(x, y)`."""
    place = tokens.index("(") if "(" in tokens else 0
    if not place or not tokens[0].isupper() or not is_variable(tokens[:place]):
        return None
    point = _bracketed(tokens[place:])
    if point is None or not point.parts or all(map(is_variable, point.parts)):
        return None
    return Form("relation", tokens, ("=",), (tokens[:place], tokens[place:]))


def _matrix(tokens: Tokens) -> Form | None:
    """Read a matrix by rows, its signs the lengths of rows, but no determinant."""
    inner = tokens[1:-1] if tokens[0] in ("(", "[") and _is_enclosed(tokens) else tokens
    if not _MATRICES & {*inner[:1]} or not _is_enclosed(inner):
        return None
    rows = [_between(row, "&") for row in _between(inner[1:-1], "\\\\") if row]
    return Form("matrix", inner, tuple(str(len(row)) for row in rows), tuple(chain.from_iterable(rows)))


def _cases(tokens: Tokens) -> Form | None:
    """Read a piecewise function as pairs of value and condition, and a system as a list of relations."""
    if tokens[0] != "\\begin{cases}" or not _is_enclosed(tokens):
        return None
    rows = _between(tuple(token for token in tokens[1:-1] if token not in _IF), "\\\\")
    cells = [[*filter(None, _between(row, "&", ","))] for row in rows]
    return Form("list", tokens, (), tuple(map(tuple_of, filter(None, cells))))


def tuple_of(parts: Sequence[Tokens]) -> Tokens:
    """Return parts between round brackets."""
    return ("(", *[token for part in parts for token in (",", *part)][1:], ")")


def _plus_minus(tokens: Tokens) -> Form | None:
    r"""Read `1 \pm 2` as a list of its values."""
    values = _each_sign(tokens)
    return Form("list", tokens, (), values) if len(values) > 1 else None


def _words(tokens: Tokens) -> Form | None:
    """Read words. Three letters in a row are a word, because a product would equal its anagrams."""
    text = text_of(tokens)
    if _AMOUNTS.fullmatch(text):
        return Form("list", tokens, (), tuple(zip(tokens[::2], tokens[1::2], strict=True)))
    if _TEXT.fullmatch(text):
        return Form("words", tokens)
    content = tuple(_FILLING.sub(" ", token) if token.startswith(WORDS) else token for token in tokens)
    has_words = any(token.startswith(WORDS) and len(token) > 2 for token in tokens)
    return Form("words", content) if (has_words or len(tokens) > 2) and words_of(content) else None


_READERS: tuple[Callable[[Tokens], Form | None], ...] = (
    _arithmetic,
    lambda tokens: _builder(tokens) if tokens[1:2] == ("|",) else None,
    _list,
    _without_domain,
    _reader("union", frozenset({"\\cup"})),
    _reader("relation", RELATIONS),
    _ratio,
    _numeral,
    _bracketed,
    _point,
    _matrix,
    _cases,
    _plus_minus,
    _words,
)


def _expand(parts: Sequence[Tokens]) -> tuple[Tokens, ...]:
    r"""Return the parts of a list or set, with `1 \pm 2` as two parts."""
    found: list[Tokens] = []
    for part in parts:
        signs = form_of(part) if {"\\pm", "\\mp"} & {*part} else None
        found.extend(signs.parts if signs and signs.kind == "list" else [part])
    return tuple(found)


def _each_sign(tokens: Tokens) -> tuple[Tokens, ...]:
    r"""Return the tokens with each choice of plus-minus signs; with a `\mp`, all signs change together."""
    if "\\mp" in tokens:
        return tuple(tuple(map(choice.get, tokens, tokens)) for choice in _TOGETHER)
    places = [place for place, token in enumerate(tokens) if token == "\\pm"]
    if len(places) > _MAX_SIGNS:
        return (tokens,)
    found = []
    for signs in product("+-", repeat=len(places)):
        one = list(tokens)
        for place, sign in zip(places, signs, strict=True):
            one[place] = sign
        found.append(tuple(one))
    return tuple(found)
