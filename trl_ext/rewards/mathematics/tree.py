"""The tree of an expression: nested tuples of an operation and its operands.

("num", Fraction)   ("const", "pi" | "e" | "i")   ("var", name)
("add", a, b, ...)   ("mul", a, b, ...)   ("pow", base, exponent)
("sin", a)   ("log", a, base)   ("factorial", a)   ... the other functions

A sum holds no sum and a product no product as an operand; a quotient is a product with powers of -1.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

LEAVES = frozenset({"num", "const", "var"})
MINUS_ONE: Node = ("num", Fraction(-1))


def combine(kind: str, operands: Iterable[Node]) -> Node:
    """Return the sum ("add") or product ("mul") of operands; one operand is returned as it is."""
    flat: list[Node] = []
    for operand in operands:
        flat.extend(operand[1:] if operand[0] == kind else [operand])
    return flat[0] if len(flat) == 1 else (kind, *flat)


def negative(node: Node) -> Node:
    return ("num", -node[1]) if node[0] == "num" else combine("mul", [MINUS_ONE, node])


def inverse(node: Node) -> Node:
    """Return 1 / node, for a product the product of the inverse factors."""
    if node[0] == "mul":
        return combine("mul", map(inverse, node[1:]))
    return node[1] if is_inverse(node) else ("pow", node, MINUS_ONE)


def is_inverse(node: Node) -> bool:
    return node[0] == "pow" and node[2] == MINUS_ONE


def is_whole(node: Node) -> bool:
    """Return True for an integer that is written as a number."""
    return node[0] == "num" and node[1].denominator == 1


def is_whole_power(node: Node) -> bool:
    return node[0] == "pow" and is_whole(node[2])


def is_root(node: Node) -> bool:
    """Return True for a power with other than a whole number as exponent."""
    return node[0] == "pow" and not is_whole(node[2])


def operands(node: Node) -> Node:
    return () if node[0] in LEAVES else node[1:]


def walk(node: Node) -> list[Node]:
    """Return a node and all nodes below it, level by level."""
    found = [node]
    for one in found:
        found.extend(operands(one))
    return found


def has_variable(node: Node) -> bool:
    return any(one[0] == "var" for one in walk(node))


def parts(kind: str, node: Node) -> Node:
    """Return the terms of a sum ("add") or the factors of a product ("mul"); another node is the only part."""
    return node[1:] if node[0] == kind else (node,)
