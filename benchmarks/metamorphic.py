r"""Rewrite right answers: harmless rewrites must stay paid, harmful ones must not be.

No list of cheats knows the user's golds. Here each row's own gold is rewritten: into texts that mean the same
(`rewrites`), and into texts that mean something else (another digit, a part left out), that name several answers, or
that leave to the reader what the task asked to compute.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewrites import Rewrite, latex, respelled, restated

from trl_ext.rewards.auditing.audit import ANNOUNCED, earns_all, gold_key
from trl_ext.rewards.auditing.redteam import gold_of, wrong_answers
from trl_ext.rewards.base.rule import Row, Rule, applies, ideal_of
from trl_ext.rewards.mathematics.evaluate import same_value, value_of
from trl_ext.rewards.mathematics.form import Form, form_of, is_variable
from trl_ext.rewards.mathematics.literal import left_to_compute
from trl_ext.rewards.mathematics.tokens import Tokens, TooComplex, Unreadable, is_symbol, tokenize
from trl_ext.rewards.mathematics.units import split_unit
from trl_ext.rewards.ruleset import RuleSet
from trl_ext.rewards.totals.scorer import Scorer

LEAST_HARMLESS_FRAC = 0.98  # of the harmless rewrites must be paid; a task may ask for one form of several
_MAX_CHARS = 200  # of an answer that is rewritten; a longer one is a text or a program
_MAX_EXAMPLES = 100
_LETTER = re.compile(r"(?:\\text(?:bf)?\{)?\(?[A-J]\)?\}?")
_MAX_DIGITS = 4  # that are changed, each by itself
_MAX_TERMS = 60  # of a sum of ones
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}
_OTHER_BRACKET = {"(": "[", "[": "(", ")": "]", "]": ")"}


@dataclass(frozen=True, slots=True)
class Surprise:
    """A rewrite that earned what it should not, or did not earn what it should.

    Args:
        rule: The rule that judged.
        row: Number of the row, from 0.
        harmful: True for a harmful rewrite that was paid, False for a harmless one that was not.
        how: What was done to the answer.
        completion: The rewritten completion.
        detail: What the rule said.
    """

    rule: str
    row: int
    harmful: bool
    how: str
    completion: str
    detail: str

    def __str__(self) -> str:
        what = "harmful and paid" if self.harmful else "harmless and not paid"
        return f"{self.rule}, row {self.row}: {what} ({self.how}): {self.completion!r:.100}; {self.detail:.100}"


@dataclass(frozen=True, slots=True)
class Metamorphic:
    """Counts of rewrites that were judged and of those that were paid; rewrites that got no value are not counted."""

    num_harmless: int = 0
    num_harmless_paid: int = 0
    num_harmful: int = 0
    num_harmful_paid: int = 0
    surprises: tuple[Surprise, ...] = ()

    @property
    def ok(self) -> bool:
        """True where no harmful rewrite was paid, and all but 2 % of the harmless ones were."""
        return not self.num_harmful_paid and self.num_harmless_paid >= LEAST_HARMLESS_FRAC * self.num_harmless

    def __str__(self) -> str:
        shares = (
            f"{kind} rewrites of right answers: {paid} of {count} paid ({paid / max(count, 1):.1%})"
            for kind, paid, count in (
                ("harmless", self.num_harmless_paid, self.num_harmless),
                ("harmful", self.num_harmful_paid, self.num_harmful),
            )
        )
        return "\n".join(shares)


def rewrite_golds(rules: RuleSet, data: Sequence[Mapping[str, Any]]) -> Metamorphic:
    """Judge rewrites of each row's gold by every rule that judges correctness and can say what would be right."""
    scorer = Scorer(rules.limits, rules.isolate, rules.on_error)
    golds = [gold_of(rules.rules, row, number) for number, row in enumerate(data)]
    num_judged, num_paid = {False: 0, True: 0}, {False: 0, True: 0}  # by whether the rewrites are harmful
    surprises: list[Surprise] = []
    for rule in rules.rules:
        asked = [*_asked(rule, data, golds)] if rule.judges_correctness else []
        if not asked:
            continue
        rows = [Row(data[one.row].get("prompt"), one.completion, None, data[one.row]) for one in asked]
        (column,) = scorer.columns([rule], rows)
        unmet = {one.row for one, verdict in zip(asked, column.verdicts, strict=True)
                 if one.how == "none" and not earns_all(rule, verdict)}  # fmt: skip
        for one, verdict in zip(asked, column.verdicts, strict=True):
            if one.how == "none" or one.row in unmet or verdict.value is None:
                continue  # A gold that does not meet itself says nothing about its rewrites.
            is_paid = earns_all(rule, verdict)
            num_judged[one.harmful] += 1
            num_paid[one.harmful] += is_paid
            if is_paid is one.harmful and len(surprises) < _MAX_EXAMPLES:
                surprises.append(Surprise(rule.name, one.row, one.harmful, one.how, one.completion, verdict.detail))
    return Metamorphic(num_judged[False], num_paid[False], num_judged[True], num_paid[True], tuple(surprises))


@dataclass(frozen=True, slots=True)
class _Asked:
    row: int
    harmful: bool
    how: str
    completion: str


def _asked(rule: Rule, data: Sequence[Mapping[str, Any]], golds: Sequence[str | None]) -> Iterator[_Asked]:
    known = [gold for gold in golds if gold is not None]
    for number, row in enumerate(data):
        ideal = ideal_of(rule, row, number) if applies(rule.when, row) else None
        if ideal is None:
            continue
        match = ANNOUNCED.fullmatch(ideal)
        start, end = match.span(match.lastindex or 0) if match else (0, len(ideal))
        before, answer, behind = ideal[:start], ideal[start:end], ideal[end:]
        if len(answer) > _MAX_CHARS or "\n" in answer or not answer.strip() or _num_golds(rule, row) > 1:
            continue
        yield _Asked(number, False, "none", ideal)
        wrong, other = wrong_answers(golds[number] or "", known)
        # Beside others, the parts of a list may be the parts that it has.
        hedged = "," not in answer and gold_key(wrong) != gold_key(answer)
        found = [(True, one) for one in several(answer, wrong, other)] if hedged else []
        if compares_values(rule) and not _LETTER.fullmatch(_bare(answer)):
            found += [(False, one) for one in (*restated(answer), *respelled(answer))]
            found += [(True, one) for one in wrong_values(answer)]
            if getattr(rule, "form", "auto") != "any":
                found += [(True, one) for one in uncomputed(answer)]
        for harmful, one in found:
            yield _Asked(number, harmful, one.how, f"{before}{one.text}{behind}")


def compares_values(rule: Rule) -> bool:
    """Return True where another text of the gold's value must earn the ceiling, too."""
    return getattr(rule, "kind", "number") == "number"


def _num_golds(rule: Rule, columns: Mapping[str, Any]) -> int:
    cell = columns.get(getattr(rule, "gold", ""))
    return len(cell) if isinstance(cell, list | tuple) else 1


# Harmful rewrites ------------------------------------------------------------------------------------------------


def several(answer: str, wrong: str, other: str) -> tuple[Rewrite, ...]:
    """Return texts that name the answer among others, or deny it; no rule may take one of them for the answer."""
    texts = {
        "several": f"{wrong}, {answer}, {other}",
        "either, or": f"{wrong} or {answer} or {other}",
        "denied": f"not {answer}",
        "wrong, then right, then wrong": f"{wrong}; no, {answer}; no, {other}",
    }
    return tuple(Rewrite("whole", how, text) for how, text in texts.items())


def wrong_values(answer: str) -> tuple[Rewrite, ...]:
    r"""Return texts like the answer that mean something else.

    Example:
        >>> [rewrite.text for rewrite in wrong_values("18")]
        ['28', '19', '-18', '180', '18 = 19', '\\pm 18']
    """
    bare = _bare(answer)
    try:
        tokens = tokenize(bare)
        found = [*_other_texts(bare, tokens)]
        if not _is_worked(form_of(tokens)):
            found = [*_other_digits(bare), *found]
    except (Unreadable, TooComplex):
        return ()
    return tuple(Rewrite("whole", how, text) for how, text in dict.fromkeys(found) if not _means(text, tokens))


def uncomputed(answer: str) -> tuple[Rewrite, ...]:
    r"""Return texts of the answer's value that leave something to compute; () for one that is not written out itself.

    Example:
        >>> [rewrite.text for rewrite in uncomputed("18")][:4]
        ['18+0', '1 \\cdot 18', '17+1', '\\frac{36}{2}']
    """
    bare = _bare(answer)
    try:
        form = form_of(tokenize(bare))
        if form.kind != "scalar" or split_unit(form.tokens)[1] or left_to_compute(form.tokens):
            return ()
        exact = value_of(form.tokens).exact
    except (Unreadable, TooComplex):
        return ()
    texts = {"0 added": f"{bare}+0", "multiplied by 1": f"1 \\cdot {f'({bare})' if exact is None else bare}"}
    if exact is not None and exact.denominator == 1:
        texts |= _of_whole_number(int(exact))
    return tuple(Rewrite("whole", how, text) for how, text in texts.items())


def _of_whole_number(number: int) -> dict[str, str]:
    texts = {"a sum": f"{number - 1}+1", "a quotient": f"\\frac{{{2 * number}}}{{2}}", "the power 1": f"{number}^1"}
    if number > 1:
        texts["a root"] = f"\\sqrt{{{number * number}}}"
    divisor = next((one for one in range(2, 100) if number % one == 0 and one < abs(number)), None)
    if divisor:
        texts["a product"] = f"{divisor} \\times {number // divisor}"
    if 1 < number <= _MAX_TERMS:
        texts["a sum with its sign"] = f"\\sum_{{k=1}}^{{{number}}} 1"
    return texts


def _bare(answer: str) -> str:
    answer = answer.strip().rstrip(".")
    is_wrapped = answer.count("$") == 2 and answer[0] == answer[-1] == "$"
    return answer[1:-1].strip() if is_wrapped else answer


def _is_worked(form: Form) -> bool:
    r"""Return True for `\cos 2\pi = 1`, alone or in a list: another digit may lead to the same value."""
    if form.kind == "relation":
        return "=" in form.signs and not (len(form.parts) == 2 and is_variable(form.parts[0]))
    return any(_is_worked(form_of(part)) for part in form.parts)


def _other_digits(answer: str) -> Iterator[tuple[str, str]]:
    numbers = list(re.finditer(r"[0-9]+", answer))[:_MAX_DIGITS]
    for number in numbers:
        for place in dict.fromkeys((number.start(), number.end() - 1)):
            digit = int(answer[place]) % 9 + 1
            yield "another digit", f"{answer[:place]}{digit}{answer[place + 1 :]}"


def _other_texts(answer: str, tokens: Tokens) -> Iterator[tuple[str, str]]:
    form = form_of(tokens)
    if form.kind == "scalar":
        yield from _of_scalar(answer, form)
    elif form.kind in ("list", "set", "tuple") and len(form.parts) > 1 and "\\pm" not in tokens:
        parts = [latex(part) for part in form.parts[:-1]]
        brackets = (tokens[0], tokens[-1]) if form.kind != "list" else ("", "")
        yield "a part left out", f"{brackets[0]}{', '.join(parts)}{brackets[1]}"
        if form.kind == "tuple" and ({"[", "]"} & {*form.signs} or "\\infty" in tokens):
            place = -1 if "\\infty" in form.parts[0] else 0
            changed = [*tokens]
            changed[place] = _OTHER_BRACKET.get(tokens[place], tokens[place])
            yield "another bracket", latex(tuple(changed))
    elif form.kind == "relation" and len(form.signs) == 1 and form.signs[0] in _FLIPPED:
        yield "relation turned", latex(tuple(_FLIPPED.get(token, token) for token in tokens))


def _of_scalar(answer: str, form: Form) -> Iterator[tuple[str, str]]:
    value, unit = split_unit(form.tokens)
    known = value_of(value)
    is_whole = answer.isascii() and answer.lstrip("-").isdigit()
    yield "another sign", answer[1:] if answer.startswith("-") else f"-{answer}"
    if known.exact is not None:
        if is_whole:
            yield "ten times", f"{answer}0"
            yield "a chain with a wrong end", f"{answer} = {int(answer) + 1}"
            yield "plus or minus", f"\\pm {answer}"
        elif _never_ends(known.exact) and not unit:
            yield "rounded", f"{float(known.exact):.3f}"
    letters = [token for token in dict.fromkeys(value) if len(token) == 1 and is_symbol(token) and token not in "ei"]
    if len(letters) == 1:
        other = "y" if letters[0] != "y" else "z"
        yield "another variable", latex(tuple(other if token == letters[0] else token for token in form.tokens))


def _never_ends(value: Fraction) -> bool:
    """Return True for a number with infinitely many decimals."""
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom > 1


def _means(text: str, tokens: Tokens) -> bool:
    """Return True where a rewrite has the answer's value after all, such as `-0` for 0."""
    try:
        changed = tokenize(text)
        return changed == tokens or same_value(value_of(split_unit(changed)[0]), value_of(split_unit(tokens)[0]))
    except (Unreadable, TooComplex):
        return False
