"""Decide which answers reach a scorer of reasoning-gym, and which of its scorers are not used.

In version 0.1.25 nine scorers pass the answer, or a part of the entry, to `eval` or to SymPy's parser, which is
`eval` too, and others can be made to fill the memory with a short answer. Such an answer is first tested against
the small language that its family needs. A scorer that is not in the tables and names `eval`, `exec` or a parser is
refused, so that neither a later version nor a user's own family brings the hole back.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

MAX_CHARS = 20_000  # of an answer; a longer one is `too_long`
_MAX_FORMULA_CHARS = 300  # of an answer that is read as a formula

# Scorers that pay for an answer that is the same for every task; measured on 200 tasks each.
FAULTY = {
    "coin_flip": "it gives 1.0 to any prefix of the right number: the answer 0 earns it in 187 of 200 tasks",
    "game_of_life_halting": "it gives 1.0 to any answer that is not empty",
    "puzzle24": "it does not ask for the task's numbers: 6*4+1-1 earns 1.0 in 200 of 200 tasks",
}

_FUNCTIONS = {*"sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs".split()}
# `power` allows no towers (9**9**9): its exponent is a number of two digits, a fraction of such or one letter, and no
# other power follows. "//" would divide and round, which no task means.
_FORMULA = re.compile(
    r"""\s+
    | (?P<number>[0-9]{1,20}(?>(?:\.[0-9]{1,20})?))(?![\w.])
    | (?P<power>\*\*\s*+(?:-?[0-9]{1,2}(?![\w.])|\(\s*-?[0-9]{1,2}\s*(?:/\s*[0-9]{1,2}\s*)?\)|[A-Za-z](?!\w|\s*\()))
      (?!\s*\*\*)
    | (?P<name>[A-Za-z]++)(?![\w.])
    | (?P<open>\() | (?P<close>\)) | [-+] | \*(?!\*) | /(?!/)""",
    re.VERBOSE | re.ASCII,
)
_MAX_DEPTH = 8
_MAX_BRACKET_POWERS = 3  # powers of a bracket, none inside another: each multiplies the size of what is in it
_LARGE_POWER = re.compile(r"\*\*\s*(?:[2-9][0-9]|1[3-9])")  # of a bracket: SymPy writes (x + y + z)**99 out
_PARSERS = frozenset({"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "interpret"})


def is_formula(text: str) -> bool:
    """Return True for short arithmetic with one-letter variables, small powers and well-known functions.

    Example:
        >>> is_formula("2*(2 - 8*x)**(3/2)/3 + C"), is_formula("9**9**9"), is_formula("x.__class__")
        (True, False, False)
    """
    if len(text) > _MAX_FORMULA_CHARS:
        return False
    end = num_powers = 0
    # `powered` says for each open bracket whether it holds a power of a bracket; `closed` for the one closed last.
    powered, closed = [False], False
    last = ""
    while end < len(text):
        token = _FORMULA.match(text, end)
        if token is None:
            return False
        kind, word, end = token.lastgroup, token[0], token.end()
        if word.isspace():
            continue
        if kind == "open":
            # A letter called as a function would be whatever SymPy has under that letter.
            if (last.isalnum() and last not in _FUNCTIONS) or len(powered) > _MAX_DEPTH:
                return False
            powered.append(False)
        elif kind == "close":
            closed = powered.pop()
            if not powered:
                return False
            powered[-1] |= closed
        elif kind == "power" and last == ")":
            num_powers += 1
            if closed or num_powers > _MAX_BRACKET_POWERS or _LARGE_POWER.match(word):
                return False
            powered[-1] = True
        elif kind == "name" and len(word) > 1 and word not in _FUNCTIONS:
            return False
        last = word
    return len(powered) == 1


def is_literal(text: str) -> bool:
    """Return True for a Python literal, so that `eval` of it runs nothing."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_moves(text: str) -> bool:
    """Return True when no move is repeated a hundred times or more: the scorers do them one by one."""
    return len(text) <= 2000 and not re.search(r"\d{3}", text)


_NO_PROPOSITION = re.compile(r"[^A-Z\s()\u2227\u2228\u00ac\u2192\u2194]|[A-Z]\s*[A-Z]")
ANSWERS: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "codeio": lambda text: len(text) <= 4000,  # The scorer's time is quadratic.
    # The scorer gives 1.0 to a distance that is not a number.
    "complex_arithmetic": lambda text: not re.search(r"nan|inf", text.replace(" ", ""), re.IGNORECASE),
    "countdown": lambda text: is_formula(text) and not re.search(r"[A-Za-z]|\*\*", text),
    "intermediate_integration": is_formula,
    "n_queens": is_literal,
    "polynomial_multiplication": is_formula,
    # Short, of one-letter propositions: the scorer's work doubles with every name.
    "propositional_logic": lambda text: len(text) <= _MAX_FORMULA_CHARS and not _NO_PROPOSITION.search(text),
    "rubiks_cube": is_moves,
    "rush_hour": is_moves,
    "simple_integration": is_formula,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
}


def answer_is_safe(family: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return True when the family's scorer may see the answer; the entry's own answers are compared, not evaluated."""
    test = ANSWERS.get(family)
    if test is is_literal:
        own = (str(entry["answer"]).strip(), *map(str, entry["metadata"].get("valid_answers") or ()))
        return answer in own or is_literal(answer)
    return test is None or test(answer)


def entry_is_safe(family: str, entry: Mapping[str, Any]) -> bool:
    """Return True when the parts of an entry that its scorer evaluates look as its generator writes them."""
    if family == "number_sorting":
        return is_literal(str(entry["answer"]))
    if family == "bitwise_arithmetic":
        problem = str(entry["metadata"]["problem"])
        # A shift by more than two digits would build a number of as many bits.
        return len(problem) <= 2000 and not re.search(r"[^0-9a-fx()+\-*<>\s]|\*\s*\*|<<\s*0x[0-9a-f]{3}", problem)
    if family in ("simple_integration", "intermediate_integration"):
        name = entry["metadata"]["variable"]
        is_variable = isinstance(name, str) and len(name) == 1 and name.isalpha()
        return is_variable and is_formula(str(entry["metadata"]["integrand"]))
    return family != "polynomial_multiplication" or is_formula(str(entry["answer"]))


def runs_code(family: str, scorer: Callable[..., Any]) -> bool:
    """Return True when the names in a scorer's code tell that it evaluates text, and no table covers it."""
    if family in ANSWERS or family in ("number_sorting", "bitwise_arithmetic"):
        return False
    owner = getattr(scorer, "__self__", None)
    names = {name for kind in type(owner).__mro__ for name in _names_behind(kind, "score_answer")}
    return bool(names & _PARSERS)


def _names_behind(kind: type, start: str) -> set[str]:
    """Return the names in a method's code, and in every function of its class and module that it names in turn."""
    module = vars(sys.modules[kind.__module__])
    found: set[str] = set()
    todo = [start]
    while todo:
        function = vars(kind).get(todo[-1], module.get(todo[-1]))
        function = getattr(function, "__func__", function)
        found.add(todo.pop())
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            todo += set(_code_names(code)) - found
    return found


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def read_entry(family: str, text: str) -> Any:
    """Read the entry as its scorer wants it, anew on each call because some scorers write into it."""
    entry = json.loads(text)
    if family in ("arc_agi", "rearc"):  # They compare with tuples, which JSON does not have.
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    return entry
