r"""math-verify and latex2sympy2_extended behind limits: the profile for evaluation, and what our own reading leaves over.

Both call sympy, which may not return; so the text is bounded before (`math_gate`), and the rule runs in a worker. Their
own timeouts are SIGALRM, which works in no thread but the main one and cancels other alarms: they are switched off.
"""

from functools import lru_cache
from typing import Any

from trl_ext.errors import SupportError
from trl_ext.rewards.math_tokens import WORDS, Tokens, latex

_BEYOND_OURS = frozenset({"\\sum", "\\prod", "\\gcd", "\\lcm", "\\max", "\\min"})


def require() -> None:
    """Raise SupportError unless math-verify can be imported."""
    try:
        import latex2sympy2_extended.antlr_parser
        import math_verify  # noqa: F401
    except ImportError as error:
        raise SupportError(
            f"The rule Math needs math-verify with an ANTLR runtime ({error}). Install trl-ext[math], or "
            'math-verify[antlr4_13_2]>=0.9.'
        ) from error


def can_read(tokens: Tokens) -> bool:
    """Whether the library may compare this expression in training: sums, products and the like, without words."""
    return not any(token.startswith(WORDS) or not token.isascii() for token in tokens) and not _is_indexed(tokens)


def _is_indexed(tokens: Tokens) -> bool:
    """`52_8`: the library drops the index, so it would take 52 for it."""
    return any(token == "_" and tokens[place - 1][0].isdigit() for place, token in enumerate(tokens) if place)


def same_expression(gold: Tokens, answer: Tokens) -> bool:
    """Whether the library finds two expressions equal, at least one of them beyond our own reading."""
    if not _BEYOND_OURS & {*gold, *answer} or _letters(gold) != _letters(answer):
        return False
    return same_answer(latex(gold), latex(answer))


def _letters(tokens: Tokens) -> frozenset[str]:
    """Upper-case letters: the library would not tell them from lower-case ones."""
    return frozenset(token for token in tokens if len(token) == 1 and token.isupper())


def same_answer(gold: str, answer: str) -> bool:
    """Whether math-verify finds an answer right. Both are LaTeX without delimiters."""
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=4096)  # The library keeps 20 parses; a batch has more golds.
def _parsed(text: str) -> tuple[Any, ...]:
    import math_verify
    from math_verify import grader, parser

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # One warning a process says nothing new here.
    return tuple(math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None))
