r"""Parse one expression (no relation, no comma) into a `tree`, by recursive descent over its tokens.

Ambiguous expressions raise Unreadable: `1/2x`, adjacent numbers, an indexed number (`52_8`). A product without a sign
(`2\pi`, `x(x+1)`) binds like a product with a sign, and `1\frac{1}{2}` is a mixed number.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from trl_ext.rewards.mathematics.spelling import WORDS, is_number
from trl_ext.rewards.mathematics.tokens import MAX_DIGITS, Tokens, TooComplex, Unreadable, closes_at, is_symbol
from trl_ext.rewards.mathematics.tree import MINUS_ONE, Node, combine, inverse, negative

_DEGREE: tuple[Node, ...] = (("const", "pi"), ("num", Fraction(1, 180)))
FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp".split())
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ROUNDING = {"\\lfloor": "floor", "\\lceil": "ceil"}
_PERIOD = re.compile(r"[0-9]+(?: \.|\.([0-9]+)) \\overline \{ ([0-9]+) \}")  # `0.\overline{3}`, `0.1\overline{6}`
_MIXED = re.compile(r"[0-9]+ (?:([0-9]+) / ([0-9]+)(?= |\Z)|\\frac \{ ([0-9]+) \} \{ ([0-9]+) \})")
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

    def until(self, end: int) -> Tokens:
        """Read the tokens before position `end`, and the one there."""
        if end < 0:
            raise Unreadable("a bracket is not closed")
        inner = self.tokens[self.position : end]
        self.position = end + 1
        return inner

    def sum(self) -> Node:
        terms = [self.with_sign(self.product)]
        while self.peek() in ("+", "-"):
            minus = self.next() == "-"
            term = self.with_sign(self.product)
            terms.append(negative(term) if minus else term)
        return combine("add", terms)

    def product(self) -> Node:
        factors = [self.power()]
        divided = False
        while True:
            token = self.peek()
            if token in ("\\cdot", "/"):
                self.next()
                factor = self.with_sign(self.power)
                divided = token == "/"
                factors.append(inverse(factor) if divided else factor)
            elif not self.starts_factor(token):
                return combine("mul", factors)
            elif divided:
                raise Unreadable("a product after a slash is ambiguous")
            else:
                factors.append(self.power())

    def with_sign(self, read: Callable[[], Node]) -> Node:
        """Read plus and minus signs and what follows them."""
        is_negative = False
        while self.peek() in ("+", "-"):
            is_negative ^= self.next() == "-"
        node = read()
        return negative(node) if is_negative else node

    def starts_factor(self, token: str) -> bool:
        """Return True if a token after a factor starts another factor; a number does only in `(n-2)2^n`."""
        if not token or token == "|":
            return False
        if is_number(token):
            return self.tokens[self.position - 1] == ")"
        return token in _READERS or is_symbol(token)

    def power(self) -> Node:
        base = self.primary()
        exponents: list[Node] = []
        while self.peek() in ("^", "!", "\\degree"):
            sign = self.next()
            if sign == "^":
                exponents.append(self.braced())
                if len(exponents) > _MAX_TOWER:
                    raise TooComplex(f"more than {_MAX_TOWER} exponents on one another")
                continue
            base, exponents = _tower(base, exponents), []
            # A degree is here a function's argument; the unit of a whole answer is split off before.
            base = ("factorial", base) if sign == "!" else combine("mul", [base, *_DEGREE])
        return _tower(base, exponents)

    def after(self, sign: str) -> list[Node]:
        """Read a sign and its argument in braces, if the sign is next."""
        if self.peek() != sign:
            return []
        self.next()
        return [self.braced()]

    def braced(self) -> Node:
        if self.peek() != "{":
            raise Unreadable("an argument is missing")
        return self.bracket()

    def bracket(self) -> Node:
        """Read the expression between the bracket at this position and its closing bracket."""
        end = closes_at(self.tokens, self.position)
        opening = self.next()
        node = parse(self.until(end))
        if self.tokens[end] != _PAIRS[opening]:
            raise Unreadable(f"'{opening}' is not closed")
        return (_ROUNDING[opening], node) if opening in _ROUNDING else node

    def primary(self) -> Node:
        token = self.peek()
        if token in _READERS:
            return _READERS[token](self)
        self.next()
        if is_number(token):
            return self.number(token)
        if is_symbol(token):
            return self.symbol(token)
        raise Unreadable(f"'{token}' is not understood")

    def number(self, token: str) -> Node:
        """Read a number: plain, mixed (`1 1/2`, `1\\frac{1}{2}`), or with digits that repeat (`0.\\overline{3}`)."""
        if len(token) > MAX_DIGITS:
            raise TooComplex(f"a number of more than {MAX_DIGITS} digits")
        if self.peek() == "_":
            raise Unreadable("a number with an index has another base")
        value = Fraction(token)
        if not self.peek():
            return ("num", value)
        text = " ".join(self.tokens[self.position - 1 : self.position + 7])
        if found := _PERIOD.match(text):
            places, period = len(found[1] or ""), found[2]
            value += Fraction(int(period), 10 ** len(period) - 1) / 10**places
        elif found := _MIXED.match(text):
            top, bottom = map(int, filter(None, found.groups()))
            if top >= bottom:
                return ("num", value)
            value += Fraction(top, bottom)
        else:
            return ("num", value)
        self.position += len(found[0].split()) - 1
        return ("num", value)

    def bars(self) -> Node:
        """Read `|x|` up to the next bar; bars within bars are not understood."""
        self.next()
        ends = (place for place in range(self.position, len(self.tokens)) if self.tokens[place] == "|")
        return ("abs", parse(self.until(next(ends, -1))))

    def function(self) -> Node:
        name = self.next()[1:]
        base = self.after("_") if name == "log" else []
        exponents = self.after("^")
        if exponents == [MINUS_ONE] and name in _INVERSE:
            name, exponents = _INVERSE[name], []
        return _tower((name, self.argument(), *base), exponents)

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
        return combine("mul", factors)

    def root(self) -> Node:
        self.next()
        degree: Node = self.bracket() if self.peek() == "[" else ("num", Fraction(2))
        return ("pow", self.primary(), inverse(degree))

    def symbol(self, token: str) -> Node:
        name = token.lstrip(WORDS + "\\")
        while self.peek() == "'":
            name += self.next()
        if self.peek() != "_":
            return ("const" if name in ("e", "i") else "var", name)
        self.next()
        end = closes_at(self.tokens, self.position)
        self.next()
        return ("var", name + "_" + "".join(self.until(end)))

    def accented(self) -> Node:
        """Read `\\bar{x}` as a separate variable."""
        accent = self.next()
        end = closes_at(self.tokens, self.position)
        self.next()
        name = self.until(end)
        if not name or not is_symbol(name[0]):
            raise Unreadable(f"'{accent}' of an expression")
        return ("var", accent + "".join(name))

    def fraction(self) -> Node:
        self.next()
        return combine("mul", [self.braced(), inverse(self.braced())])

    def binomial(self) -> Node:
        self.next()
        return ("binomial", self.braced(), self.braced())

    def pi(self) -> Node:
        self.next()
        return ("const", "pi")


def _tower(base: Node, exponents: list[Node]) -> Node:
    """Return a base with its exponents; `2^3^2` is 2^(3^2)."""
    if not exponents:
        return base
    exponent = _tower(exponents[0], exponents[1:])
    return inverse(base) if exponent == MINUS_ONE else ("pow", base, exponent)


_READERS: dict[str, Callable[[_Reader], Node]] = {
    **dict.fromkeys(_PAIRS, _Reader.bracket),
    **{"\\" + name: _Reader.function for name in FUNCTIONS},
    **dict.fromkeys(("\\bar", "\\hat", "\\vec", "\\tilde", "\\widehat", "\\underline"), _Reader.accented),
    "|": _Reader.bars,
    "\\frac": _Reader.fraction,
    "\\binom": _Reader.binomial,
    "\\pi": _Reader.pi,
    "\\sqrt": _Reader.root,
}
