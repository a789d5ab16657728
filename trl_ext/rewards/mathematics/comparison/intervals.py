r"""Write inequalities as intervals, and several of them as a union."""

import math
from collections.abc import Sequence
from itertools import pairwise

from trl_ext.rewards.mathematics.bounds import Unreadable
from trl_ext.rewards.mathematics.evaluate import real_value
from trl_ext.rewards.mathematics.form import Form, form_of, is_name
from trl_ext.rewards.mathematics.tokens import Tokens

FLIPPED = {
    "<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq", "\\approx": "\\approx",
}  # fmt: skip


def interval(relation: Form) -> Tokens | None:
    r"""Return `1 < x \leq 2` as `(1, 2]`, `x > 3` as `(3, \infty)` and `x \neq 3` as a union; None for any other."""
    signs, parts = relation.signs, relation.parts
    if signs == ("\\neq",) and is_name(parts[0]):
        edge = parts[1]
        return ("(", "-", "\\infty", ",", *edge, ")", "\\cup", "(", *edge, ",", "\\infty", ")")
    if signs[0] in (">", "\\geq"):
        signs, parts = tuple(FLIPPED[sign] for sign in reversed(signs)), parts[::-1]
    if not set(signs) <= {"<", "\\leq"}:
        return None
    if len(parts) == 2:
        infinite = ("-", "\\infty") if is_name(parts[0]) else ("\\infty",)
        parts = (infinite, *parts) if is_name(parts[0]) else (*parts, infinite)
        signs = ("<", *signs) if len(infinite) == 2 else (*signs, "<")
    if len(parts) != 3 or not is_name(parts[1]):
        return None
    opening, closing = "[" if signs[0] == "\\leq" else "(", "]" if signs[1] == "\\leq" else ")"
    return (opening, *parts[0], ",", *parts[2], closing)


def union_of(parts: Sequence[Tokens]) -> Form | None:
    r"""Return `x < 1, x = 3, x > 5` as a union; None unless each part is one of these, and no two of them overlap.

    Parts that overlap are joined by "and", and mean what they have in common.
    """
    pieces = []
    for part in parts:
        relation = form_of(part)
        if relation.kind != "relation":
            return None
        is_point = relation.signs == ("=",) and is_name(relation.parts[0])
        piece = ("\\{", *relation.parts[1], "\\}") if is_point else interval(relation)
        if piece is None:
            return None
        pieces.append(piece)
    infinite = {("\\infty",): math.inf, ("-", "\\infty"): -math.inf}
    try:
        ends = [[infinite.get(end) or real_value(end) for end in form_of(piece).parts] for piece in pieces]
    except Unreadable:
        return None
    if any(before[1] > after[0] for before, after in pairwise(sorted((end[0], end[-1]) for end in ends))):
        return None
    return Form("union", (), (), tuple(pieces))
