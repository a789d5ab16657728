r"""Call math-verify: in the eval profile, and for expressions that `parse` cannot read.

math-verify calls sympy, which may not return: `gate` bounds the text first, and the rule runs in a worker.
math-verify's timeouts are turned off: they use SIGALRM, which works only in the main thread and cancels other alarms.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

from trl_ext.errors import SupportError
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, is_number, latex

LIBRARY_COMMANDS = frozenset({"\\sum", "\\prod", "\\gcd", "\\lcm", "\\max", "\\min"})


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


def can_read(gold: Tokens, answer: Tokens) -> bool:
    """Return True if math-verify may compare two expressions in training: only with one of `LIBRARY_COMMANDS`.

    Words, `52_8` (it drops the index) and different capitals (it reads them as small letters) are excluded.
    """
    both = (*gold, *answer)
    plain = all(token.isascii() and not token.startswith(WORDS) for token in both)
    has_index = any(is_number(before) and after == "_" for before, after in pairwise(both))
    return bool(LIBRARY_COMMANDS & {*both}) and plain and not has_index and _capitals(gold) == _capitals(answer)


def _capitals(tokens: Tokens) -> frozenset[str]:
    return frozenset(token for token in tokens if len(token) == 1 and token.isupper())


def same_expression(gold: Tokens, answer: Tokens) -> bool:
    """Return True if math-verify finds two expressions equal; each is read as a whole, with its capitals."""
    left, right = _expression(gold), _expression(answer)
    return left is not None and right is not None and _verify(left, right)


@lru_cache(maxsize=4096)  # A batch repeats golds and answers.
def _expression(tokens: Tokens) -> Any:
    """Return the sympy expression of all tokens; None if the grammar cannot read them.

    math-verify's `parse` would then look for any number in the text, and find 3 in a broken formula.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    config = ConversionConfig(lowercase_symbols=False)
    try:
        return latex2sympy(latex(tokens), normalization_config=None, conversion_config=config)
    except Exception:  # The grammar raises bare Exception, and sympy any error that an operand causes.
        return None


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
