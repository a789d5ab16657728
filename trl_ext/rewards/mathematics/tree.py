"""Trees of expressions: what `parse` builds and `size` and `values` read.

("num", Fraction)   ("const", "pi" | "e" | "i")   ("var", name)
("add", a, b, ...)  ("mul", a, b, ...)  ("pow", base, exponent)  ("call", function, argument, ...)
"""

from fractions import Fraction
from typing import Any

from trl_ext.rewards.mathematics.limits import MAX_DIGITS, TooComplex, Unreadable
from trl_ext.rewards.mathematics.tokens import WORDS

Node = tuple[Any, ...]

MINUS_ONE: Node = ("num", Fraction(-1))
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)


def number(token: str) -> Fraction:
    """The exact value of a number token."""
    if len(token) > MAX_DIGITS:
        raise TooComplex(f"a number of more than {MAX_DIGITS} digits")
    return Fraction(token)


def is_symbol(token: str) -> bool:
    """Whether a token is one variable: a letter, a letter as text, or a Greek letter."""
    if token[0] == "\\":
        return token[1:] in _GREEK
    letter = token[1:] if token[0] == WORDS else token
    return len(letter) == 1 and letter.isascii() and letter.isalpha()


def negative(node: Node) -> Node:
    if node[0] == "num":
        return ("num", -node[1])
    return ("mul", MINUS_ONE, node)


def tower(base: Node, exponents: list[Node]) -> Node:
    """`2^3^2` is 2^(3^2)."""
    if not exponents:
        return base
    node = exponents[-1]
    for exponent in reversed(exponents[:-1]):
        node = ("pow", exponent, node)
    return ("pow", base, node)


def all_whole(*tokens: str) -> bool:
    return all(token.isdigit() and token.isascii() and len(token) < MAX_DIGITS for token in tokens)


def repeating(digits: str, period: str) -> Node:
    """`0.1\\overline{6}`: the digits, then the period over and over."""
    places = len(digits.partition(".")[2])
    tail = Fraction(int(period), 10 ** len(period) - 1) / 10**places
    return ("num", number(digits) + tail)


def mixed(whole: Fraction, top: str, bottom: str) -> Node:
    if int(bottom) == 0:
        raise Unreadable("a division by zero")
    return ("num", whole + Fraction(int(top), int(bottom)))
