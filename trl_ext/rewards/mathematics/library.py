r"""Refuse what is too large to judge, and call math-verify in the eval profile.

The bounds are sizes in tokens, so every machine gives the same verdict. `evaluate.size` bounds the values of what
`parse` reads, such as `9^{9^9}`. `check_for_library` bounds what sympy gets from math-verify: sympy evaluates while it
builds an expression, and its simplification may not end.

math-verify's timeouts are turned off: they use SIGALRM, which works only in the main thread and cancels other alarms.
"""

import math
import re
from functools import lru_cache
from typing import Any

from trl_ext.errors import SupportError
from trl_ext.rewards.mathematics.evaluate import value_of
from trl_ext.rewards.mathematics.form import form_of
from trl_ext.rewards.mathematics.tokens import (
    MAX_DIGITS,
    MAX_MATRIX,
    MAX_TOKENS,
    WORDS,
    Tokens,
    TooComplex,
    Unreadable,
    closes_at,
    is_number,
)

_ENDLESS = {"\\int": "an integral", "\\iint": "an integral", "\\oint": "an integral", "\\lim": "a limit"}
_RANGES = frozenset({"\\sum", "\\prod"})
# math-verify computes these while it reads: matrices of a given size, and their decompositions.
_MATRIX_FUNCTIONS = re.compile(
    r"eye|zeros|ones|diag|norm|rank|trace|rref|stack|ortho|nullspace|eigen|eig|svd|arrow|det|cols|rows", re.IGNORECASE
)
_MAX_TERMS = 100  # of a sum or product with a sign
_MAX_LIBRARY_TOKENS = 100
_MAX_LIBRARY_TERMS = 200  # of all powers of sums after simplification, which multiplies them out
_MAX_LIBRARY_FUNCTIONS = 16  # as factors, `\\sin^8 x` being eight
_MAX_LIBRARY_NUMBER = 200  # as exponent or factorial, if the value of the expression is not known


def check_answer(tokens: Tokens) -> None:
    """Raise TooComplex for an answer that is too large for any comparison."""
    check_length(tokens, MAX_TOKENS)
    for place, token in enumerate(tokens):
        if token in _ENDLESS:
            raise TooComplex(f"{_ENDLESS[token]} is not evaluated")
        if token in _RANGES:
            _check_range(tokens, place)
        if token.startswith("\\begin"):
            inside = tokens[place + 1 : closes_at(tokens, place)]
            num_rows = inside.count("\\\\") + 1
            if num_rows > MAX_MATRIX + 1 or inside.count("&") > num_rows * (MAX_MATRIX - 1):
                raise TooComplex(f"a matrix of more than {MAX_MATRIX} rows or columns")


def check_for_library(tokens: Tokens) -> None:
    """Raise TooComplex for expressions on which sympy might not return."""
    check_length(tokens, _MAX_LIBRARY_TOKENS)
    if _MATRIX_FUNCTIONS.search("".join(token.lstrip(WORDS) for token in tokens)):
        raise TooComplex("a matrix function")
    form = form_of(tokens)
    for part in form.parts:
        check_for_library(part)
    if not form.parts:
        _check_scalar(tokens)


def check_length(tokens: Tokens, limit: int) -> None:
    """Raise TooComplex for too many tokens, and for a number of too many digits."""
    if len(tokens) > limit:
        raise TooComplex(f"more than {limit} symbols")
    if any(is_number(token) and len(token) > MAX_DIGITS for token in tokens):
        raise TooComplex(f"a number of more than {MAX_DIGITS} digits")


def _check_range(tokens: Tokens, place: int) -> None:
    r"""Raise TooComplex unless a sum or product is over a few integers, as in `\sum_{i=1}^{10}`."""
    below = _argument(tokens, place + 1, "_")
    above = _argument(tokens, place + 4 + len(below), "^")
    first, last = below[-1:], above
    numbers = [int(token) for token in (*first, *last) if token.isascii() and token.isdigit() and len(token) < 6]
    if len(numbers) != 2 or len(last) != 1 or below[-2:-1] != ("=",) or numbers[1] - numbers[0] > _MAX_TERMS:
        raise TooComplex(f"a range that is not two whole numbers at most {_MAX_TERMS} apart")


def _argument(tokens: Tokens, place: int, sign: str) -> Tokens:
    """Return the tokens inside the braces of an index or exponent at `place`; () if there is none."""
    if tokens[place : place + 2] != (sign, "{"):
        return ()
    return tokens[place + 2 : closes_at(tokens, place + 1)]


def _check_scalar(tokens: Tokens) -> None:
    """Raise TooComplex for large exponents or factorials, or sums that multiply out to many terms.

    The size of an expression that `evaluate` reads is known; in any other expression, every such number must be small.
    """
    if sum(token in _RANGES for token in tokens) > 1:
        raise TooComplex("sums within sums")
    try:
        value_of(tokens)
        limit = 10**6
    except Unreadable:
        limit = _MAX_LIBRARY_NUMBER
    num_terms, num_functions = 1.0, 0.0
    for place, token in enumerate(tokens):
        exponent = _argument(tokens, place, "^")
        if _largest_number(exponent) > limit:
            raise TooComplex("a large exponent")
        if exponent and tokens[place - 1] in (")", "}", "]"):
            num_terms *= max(1.0, _largest_number(exponent))
        if exponent and tokens[place - 1].startswith("\\"):
            num_functions += _largest_number(exponent)
        if token == "!" and _largest_number(tokens[max(0, place - 1) : place]) > _MAX_LIBRARY_NUMBER:
            raise TooComplex("a large factorial")
    if num_functions > _MAX_LIBRARY_FUNCTIONS:
        raise TooComplex("high powers of functions")
    if num_terms > _MAX_LIBRARY_TERMS:
        raise TooComplex("powers of sums that are too large to multiply out")


def _largest_number(tokens: Tokens) -> float:
    """Return the largest number among tokens; infinity if they contain a bracket, an exponent or a factorial."""
    if {"^", "!", ")", "}"} & {*tokens}:
        return math.inf
    return max((float(token) for token in tokens if is_number(token)), default=0.0)


def require() -> None:
    """Raise SupportError if math-verify cannot be imported."""
    try:
        import latex2sympy2_extended  # noqa: F401
        import math_verify  # noqa: F401
    except ImportError as error:
        raise SupportError(
            f"The rule Math needs math-verify with an ANTLR runtime ({error}). Install 'trl_ext[math]', or "
            "math-verify[antlr4_13_2]>=0.9."
        ) from error


def same_answer(gold: str, answer: str) -> bool:
    """Return True if math-verify finds an answer right; gold and answer are LaTeX without delimiters."""
    return _verify(list(_parsed(gold)), list(_parsed(answer)))


@lru_cache(maxsize=4096)  # The library keeps 20 parses; a batch has more golds.
def _parsed(text: str) -> tuple[Any, ...]:
    """Parse a whole text as math-verify parses a box, never only a number inside it."""
    import math_verify
    from math_verify import parser

    parser.TIMEOUT_WARNING_SHOWN = True  # Otherwise every process would print the warning.
    whole = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return tuple(math_verify.parse(f"\\boxed{{{text}}}", extraction_config=[whole], parsing_timeout=None))


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import grader

    grader.TIMEOUT_WARNING_SHOWN = True
    return bool(grader.verify(gold, answer, timeout_seconds=None))
