"""Judge whether the answer is mathematically the same as the gold."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_ext.rewards.mathematics.bounds import TooComplex, Unreadable
from trl_ext.rewards.mathematics.comparison import library as math_library
from trl_ext.rewards.mathematics.comparison.equal import Match, compare, why_undecided
from trl_ext.rewards.mathematics.comparison.gate import check_answer, check_for_library
from trl_ext.rewards.mathematics.extract import Extracted, extract
from trl_ext.rewards.mathematics.gold import Gold, read_gold
from trl_ext.rewards.mathematics.literal import unfit
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, tokenize
from trl_ext.rewards.rule import Row, Rule, Verdict, check_choice, check_column
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.golds import best, golds_of
from trl_ext.rewards.text.prompt import asked_forms, stands_in

_BY_TEXT = frozenset({"same text", "letter"})
_COPIED = "copied from the prompt"


@dataclass(frozen=True, slots=True)
class Math(Rule):
    r"""1.0 when the completion's answer is mathematically the gold column's, else 0.0.

    `text.reader` and `mathematics.extract` say where the answer is looked for, `gold` how a gold may be written,
    `equal` when two answers are the same. An answer that would take too long to judge, which its size and form tell
    and never a clock, is `too_long` or `too_complex` and earns 0.0. A gold that can be compared with nothing but its
    own text (`a_0 + \\ldots + a_n`, a sentence), which its text tells, leaves other answers `undecided`.

    In the train profile an answer earns 0.0 that has the gold's value and leaves work undone (`form`): one with a
    number still to be computed (`15 \\times 23`, `\\sum_{k=1}^{9} k`) unless the gold has one too, one that is not
    factored, expanded, simplified or a fraction where the task says so and the gold is, and one that stands in the
    prompt as a term. The gold's very text is always right.

    Args:
        gold: Column with the right answer, or a list of answers, each of which is right.
        profile: "train" is strict, because a policy finds every leniency. "eval" asks math-verify, and so accepts
            `5 = 3` for 3, m for cm, 0.5 for 50 percent, sets for tuples and `X` for `x`.
        where: "after_think" reads what follows the last `</think>`; "all" reads the whole completion.
        multiple: How to read several different boxes: "reject" is a conflict (0.0) unless the gold is a list, then
            they are its parts; "list" always takes them as one list, in "last" the last one decides, in
            "all_equal" each must be right.
        form: "auto" also asks for the form of an answer, by gold and prompt, in the train profile; "any" for the
            value alone.

    Raises:
        SupportError: math-verify is not installed.

    Example:
        >>> Math().score(Row(None, "so \\boxed{\\sqrt{117}}", None, {"answer": "3\\sqrt{13}"})).value
        1.0
    """

    tier: ClassVar[str] = "worker"
    judges_correctness: ClassVar[bool] = True

    gold: str = "answer"
    profile: str = "train"
    where: str = "after_think"
    multiple: str = "reject"
    form: str = "auto"

    def check(self) -> None:
        check_choice(self, "profile", self.profile, ("train", "eval"))
        check_choice(self, "where", self.where, ("after_think", "all"))
        check_choice(self, "multiple", self.multiple, ("reject", "list", "last", "all_equal"))
        check_choice(self, "form", self.form, ("auto", "any"))
        check_column(self, "gold", self.gold)
        math_library.require()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.gold,)

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        """Return the (first) gold, or its solution's answer, in a box; None where it is no text or blank."""
        text = next(iter(golds_of(columns[self.gold]) or ()), "")
        return None if not text.strip() else f"\\boxed{{{read_gold(text).text or text}}}"

    def warm_up(self) -> None:
        math_library.require()

    def cache_key(self, row: Row) -> Hashable | None:
        """Return the golds, the extracted answer, and what of the prompt matters for its form."""
        golds = golds_of(row.columns[self.gold])
        if golds is None:
            return None
        found = tuple(self._extract(row, read_gold(gold)) for gold in golds)
        return (tuple(golds), found, any(self._copied(row, one) for one in found), self._asked(row))

    def score(self, row: Row) -> Verdict:
        cell = row.columns[self.gold]
        golds = golds_of(cell)
        if golds is None:
            return Verdict(None, "gold_invalid", f"column '{self.gold}': {cell!r:.60} is neither text nor a number")
        return best(self._against(gold, row) for gold in golds)

    def _against(self, text: str, row: Row) -> Verdict:
        """Judge the row by one of its accepted golds."""
        gold = read_gold(text)
        if gold.problem:
            return Verdict(None, "gold_invalid", f"column '{self.gold}': {gold.problem}")
        found = self._extract(row, gold)
        if not found.answers:
            return Verdict(self.floor, found.status, found.detail)
        return self._judge(gold, found, self._copied(row, found), self._asked(row))

    def _extract(self, row: Row, gold: Gold) -> Extracted:
        return extract(row.text, self.where, self.multiple, gold.kind)

    def _copied(self, row: Row, found: Extracted) -> bool:
        return self._minds_form and any(stands_in(answer, row.prompt) for answer in found.answers)

    def _asked(self, row: Row) -> frozenset[str]:
        return asked_forms(row.prompt) if self._minds_form else frozenset()

    @property
    def _minds_form(self) -> bool:
        return self.form == "auto" and self.profile == "train"

    def _judge(self, gold: Gold, found: Extracted, copied: bool, asked: frozenset[str]) -> Verdict:
        told = f"'{found.anchor}': {' and '.join(found.answers)[:80]}; gold: {gold.text[:80]}"
        try:
            matches = [self._match(gold, answer, asked) for answer in found.answers]
        except TooComplex as error:
            return Verdict(self.floor, "too_complex", f"{told}; {error}")
        except RecursionError:
            return Verdict(self.floor, "too_complex", f"{told}; nested too deeply")
        except Unreadable as error:
            return Verdict(self.floor, "no_answer", f"{told}; {error}")
        undecided = next((one for one in matches if one.same is None), None)
        if undecided is not None:
            return Verdict(None, "undecided", f"{told}; only the gold's own text can be compared: {undecided.path}")
        wrong = next((one for one in matches if not one.same), None)
        if wrong is not None:
            disagree = len(matches) > 1 and any(one.same for one in matches)
            return Verdict(self.floor, "conflict" if disagree else "ok", f"{told}; {wrong.path}")
        path = matches[0].path
        if copied and path not in _BY_TEXT:
            return Verdict(self.floor, "ok", f"{told}; {_COPIED}")
        return Verdict(1.0, "ok", f"{told}; {path}")

    def _match(self, gold: Gold, answer: str, asked: frozenset[str]) -> Match:
        tokens = tokenize(answer)
        if not tokens:
            raise Unreadable("empty")
        if tokens == gold.tokens:
            return compare(gold.tokens, tokens)
        try:
            check_answer(tokens)
        except TooComplex:
            if why_undecided(gold.tokens):  # The gold's own fault: a wrong answer must not earn more than a right one.
                return Match(None, why_undecided(gold.tokens))
            raise
        if _is_choice(gold.tokens, tokens):
            # A letter may have the text of its option behind it, as in `\textbf{(C)} 12`.
            return Match(read_choice(f"answer is {answer}").value == _letter(gold.tokens), "letter")
        found = compare(gold.tokens, tokens)
        if self._minds_form and found.same and found.path not in _BY_TEXT:
            reason = unfit(gold.tokens, tokens, asked)
            return Match(False, reason) if reason else found
        if self.profile == "train" or found.same:
            return found
        try:
            check_for_library(tokens)
            check_for_library(gold.tokens)
        except TooComplex:
            if found.same is None:
                return found
            raise
        if gold.text.strip("$").replace(",", ".", 1) == answer.strip("$"):
            return Match(True, "decimal comma")
        return Match(True, "math-verify") if math_library.same_answer(gold.text, answer) else found


def _is_choice(gold: Tokens, answer: Tokens) -> bool:
    r"""Return True to compare letters: the gold is `(C)` or `\text{C}`, or C where the answer opens like an option.

    Without an option's bracket, full stop or colon, C may be a constant and is compared as an expression.
    """
    if _letter(gold) not in tuple("ABCDEFGHIJ"):
        return False
    return gold != (_letter(gold),) or answer[1:2] in ((")",), (".",), (":",)) or answer[2:3] == (")",)


def _letter(tokens: Tokens) -> str:
    return "".join(tokens).strip(WORDS + "()")
