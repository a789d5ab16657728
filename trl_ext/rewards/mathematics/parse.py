r"""Parse one expression (no relation, no comma) into a tree of tuples, by recursive descent over its tokens.

("num", Fraction)   ("const", "pi" | "e" | "i")   ("var", name)
("add", a, b, ...)  ("mul", a, b, ...)  ("pow", base, exponent)  ("call", function, argument, ...)

Ambiguous expressions raise Unreadable: `1/2x`, adjacent numbers, an indexed number (`52_8`). A product without a sign
(`2\pi`, `x(x+1)`) binds like a product with a sign, and `1\frac{1}{2}` is a mixed number.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from trl_ext.rewards.mathematics.spelling import WORDS, is_number
from trl_ext.rewards.mathematics.tokens import MAX_DIGITS, Tokens, TooComplex, Unreadable, closes_at, is_symbol

Node = tuple[Any, ...]

MINUS_ONE: Node = ("num", Fraction(-1))
_DEGREE: tuple[Node, ...] = (("const", "pi"), ("num", Fraction(1, 180)))
FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp".split())
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ROUNDING = {"\\lfloor": "floor", "\\lceil": "ceil"}
_MAX_TOWER = 8  # exponents of one base, as in 2^2^2; functions of one argument, as in \\ln \\sin x


def parse(tokens: Tokens) -> Node:
    """Return the tree of an expression, or raise Unreadable or TooComplex."""
    reader = _Reader(tokens)
    try:
        node = reader.sum()
    except RecursionError:
        raise TooComplex("brackets nested too deeply") from None
    if reader.position < len(tokens):
        raise Unreadable(f"'{tokens[reader.position]}' is not understood")
    return node


class _Reader:
    """A position in the tokens; every method reads one construct and moves past it."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.position = 0
        self.open_functions = 0  # Functions whose argument is being read, without brackets around it.

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise Unreadable("the expression ends too early")
        self.position += 1
        return token

    def sum(self) -> Node:
        terms = [self.product()]
        while self.peek() in ("+", "-"):
            minus = self.next() == "-"
            term = self.product()
            terms.append(_negative(term) if minus else term)
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        is_negative = self.signs()
        factors = [self.power()]
        divided = False
        while True:
            token = self.peek()
            if token in ("\\cdot", "/"):
                self.next()
                inner = self.signs()
                factor = self.power()
                factor = _negative(factor) if inner else factor
                factors.append(("pow", factor, MINUS_ONE) if token == "/" else factor)
                divided = token == "/"
            elif self.starts_factor(token):
                if divided:
                    raise Unreadable("a product after a slash is ambiguous")
                factors.append(self.power())
            else:
                break
        node = factors[0] if len(factors) == 1 else ("mul", *factors)
        return _negative(node) if is_negative else node

    def signs(self) -> bool:
        """Read plus and minus signs; return True for an odd number of minus signs."""
        is_negative = False
        while self.peek() in ("+", "-"):
            is_negative ^= self.next() == "-"
        return is_negative

    def starts_factor(self, token: str) -> bool:
        """Return True if a token after a factor starts another factor; a number does not (`2 3`, `x2`)."""
        if not token or token == "|":
            return False
        if is_number(token):  # `(n-2)2^n`
            return self.tokens[self.position - 1] == ")"
        return token in _PAIRS or is_symbol(token) or token[1:] in FUNCTIONS or token in _COMMANDS

    def power(self) -> Node:
        base = self.primary()
        exponents: list[Node] = []
        while self.peek() in ("^", "!", "\\degree"):
            sign = self.next()
            if sign == "\\degree":  # as a function's argument; the unit of a whole answer is split off before
                base, exponents = ("mul", _tower(base, exponents), *_DEGREE), []
            elif sign == "!":
                base = ("call", "factorial", _tower(base, exponents))
                exponents = []
            else:
                exponents.append(self.braced())
                if len(exponents) > _MAX_TOWER:
                    raise TooComplex(f"more than {_MAX_TOWER} exponents on one another")
        return _tower(base, exponents)

    def braced(self) -> Node:
        if self.peek() != "{":
            raise Unreadable("an argument is missing")
        return self.bracket()

    def bracket(self) -> Node:
        """Read the expression between the bracket at this position and its closing bracket."""
        opening = self.tokens[self.position]
        end = closes_at(self.tokens, self.position)
        if end < 0 or self.tokens[end] != _PAIRS[opening]:
            raise Unreadable(f"'{opening}' is not closed")
        node = parse(self.tokens[self.position + 1 : end])
        self.position = end + 1
        return ("call", _ROUNDING[opening], node) if opening in _ROUNDING else node

    def primary(self) -> Node:
        token = self.peek()
        if token in _PAIRS:
            return self.bracket()
        self.next()
        if is_number(token):
            return self.number(token)
        if token == "|":
            return self.bars()
        if token[1:] in FUNCTIONS and token[0] == "\\":
            return self.function(token[1:])
        if token in _COMMANDS:
            return _COMMANDS[token](self)
        if is_symbol(token):
            return self.symbol(token)
        raise Unreadable(f"'{token}' is not understood")

    def number(self, token: str) -> Node:
        """Read a number: plain, mixed (`1 1/2`, `1\\frac{1}{2}`), or with digits that repeat (`0.\\overline{3}`)."""
        if len(token) > MAX_DIGITS:
            raise TooComplex(f"a number of more than {MAX_DIGITS} digits")
        value = Fraction(token)
        rest = self.tokens[self.position : self.position + 7]
        if rest[:1] == ("_",):
            raise Unreadable("a number with an index has another base")
        dot = int(rest[:1] == (".",))
        if rest[dot : dot + 2] == ("\\overline", "{") and len(rest) > dot + 3 and _all_whole(rest[dot + 2]):
            if "e" in token.lower() or dot == ("." in token):
                raise Unreadable("a period that does not follow a decimal point")
            self.position += dot + 4
            period, places = rest[dot + 2], len(token.partition(".")[2])
            return ("num", value + Fraction(int(period), 10 ** len(period) - 1) / 10**places)
        if len(rest) >= 3 and rest[1] == "/" and _all_whole(token, rest[0], rest[2]) and int(rest[0]) < int(rest[2]):
            self.position += 3
            return _mixed(value, rest[0], rest[2])
        if rest[:1] == ("\\frac",) and len(rest) == 7 and _all_whole(token, rest[2], rest[5]) and rest[3] == "}":
            if int(rest[2]) < int(rest[5]):
                self.position += 7
                return _mixed(value, rest[2], rest[5])
        return ("num", value)

    def bars(self) -> Node:
        """Read `|x|` up to the next bar; bars within bars are not understood."""
        if "|" not in self.tokens[self.position :]:
            raise Unreadable("'|' is not closed")
        end = self.tokens.index("|", self.position)
        node = parse(self.tokens[self.position : end])
        self.position = end + 1
        return ("call", "abs", node)

    def function(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        if name == "log" and self.peek() == "_":
            self.next()
            base = (self.braced(),)
        exponent = None
        if self.peek() == "^":
            self.next()
            exponent = self.braced()
        if exponent == MINUS_ONE and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        node = ("call", name, self.argument(), *base)
        return node if exponent is None else ("pow", node, exponent)

    def argument(self) -> Node:
        """Read a function's argument: a bracket, or the factors up to a sign or the next function (`\\sin 2x`)."""
        if self.peek() in ("(", "[", "{"):
            node = self.bracket()
            if self.peek() in ("^", "!"):
                raise Unreadable("an exponent after a function's brackets is ambiguous")
            return node
        self.open_functions += 1
        if self.open_functions > _MAX_TOWER:
            raise TooComplex(f"more than {_MAX_TOWER} functions of one another")
        factors = [self.power()]
        self.open_functions -= 1
        while self.starts_factor(self.peek()) and self.peek()[1:] not in FUNCTIONS:
            factors.append(self.power())
        if self.peek() == "/":
            raise Unreadable("a slash after a function's argument is ambiguous")
        return factors[0] if len(factors) == 1 else ("mul", *factors)

    def root(self) -> Node:
        degree: Node = self.bracket() if self.peek() == "[" else ("num", Fraction(2))
        radicand = self.bracket() if self.peek() in ("{", "(") else self.primary()
        return ("pow", radicand, ("pow", degree, MINUS_ONE))

    def symbol(self, token: str) -> Node:
        name = token.lstrip(WORDS + "\\")
        while self.peek() == "'":
            name += self.next()
        if self.peek() != "_":
            return ("const" if name in ("e", "i") else "var", name)
        end = closes_at(self.tokens, self.position + 1)
        if end < 0:
            raise Unreadable("an index is not closed")
        name += "_" + "".join(self.tokens[self.position + 2 : end])
        self.position = end + 1
        return ("var", name)

    def accented(self) -> Node:
        """Read `\\bar{x}` as a separate variable."""
        accent, start = self.tokens[self.position - 1], self.position + 1
        end = closes_at(self.tokens, self.position)
        if end < 0 or not all(map(is_symbol, self.tokens[start : min(end, start + 1)])):
            raise Unreadable(f"'{accent}' of an expression")
        self.position = end + 1
        return ("var", accent + "".join(self.tokens[start:end]))


def _negative(node: Node) -> Node:
    return ("num", -node[1]) if node[0] == "num" else ("mul", MINUS_ONE, node)


def _tower(base: Node, exponents: list[Node]) -> Node:
    """Return a base with its exponents; `2^3^2` is 2^(3^2)."""
    if not exponents:
        return base
    node = exponents[-1]
    for exponent in reversed(exponents[:-1]):
        node = ("pow", exponent, node)
    return ("pow", base, node)


def _all_whole(*tokens: str) -> bool:
    return all(token.isdigit() and token.isascii() and len(token) < MAX_DIGITS for token in tokens)


def _mixed(whole: Fraction, top: str, bottom: str) -> Node:
    if int(bottom) == 0:
        raise Unreadable("a division by zero")
    return ("num", whole + Fraction(int(top), int(bottom)))


_COMMANDS: dict[str, Callable[[_Reader], Node]] = {
    "\\frac": lambda reader: ("mul", reader.braced(), ("pow", reader.braced(), MINUS_ONE)),
    "\\binom": lambda reader: ("call", "binomial", reader.braced(), reader.braced()),
    "\\pi": lambda reader: ("const", "pi"),
    "\\sqrt": _Reader.root,
    **dict.fromkeys(("\\bar", "\\hat", "\\vec", "\\tilde", "\\widehat", "\\underline"), _Reader.accented),
}
