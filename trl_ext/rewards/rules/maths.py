"""Judge whether the answer is mathematically the same as the gold."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_column
from trl_ext.rewards.mathematics.equal import Match, compare, why_undecided
from trl_ext.rewards.mathematics.extract import announced_gold, extract
from trl_ext.rewards.mathematics.form import form_of
from trl_ext.rewards.mathematics.literal import unfit
from trl_ext.rewards.mathematics.tokens import (
    MAX_GOLD_CHARS,
    MAX_GOLD_TOKENS,
    WORDS,
    Tokens,
    TooComplex,
    Unreadable,
    check_answer,
    check_length,
    is_number,
    tokenize,
)
from trl_ext.rewards.text.choices import read_choice
from trl_ext.rewards.text.reader import Candidate
from trl_ext.rewards.text.task import asked_forms, best, golds_of, stands_in, without_brackets

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # outside of commands
_LEAD = re.compile(r"\s*\\?t?ext\{[^{}]{0,40}answer[^{}]{0,9}(?::|\bis)\s*\}", re.IGNORECASE)
_DEBRIS = re.compile(r"[\\^\s]+\Z")  # `45^`, a backslash
_OPTION = re.compile(  # `(D) [1, 2]`, without a second option after it
    r"(?s)\s*(?:\\?t?ext(?:bf)?\s?\{)?(?:\(([A-J])\)|([A-J])\.|([B-J]):)\s*\}?(?:\\[,;:\s]|\s)+(?=\S)"
    r"(?!.*(?<![A-Za-z])[A-J](?:\)|\.\s|:))"
)
_MAX_WORDS = 8  # A longer gold without a box is prose, and prose is not compared.
_LETTERS = tuple("ABCDEFGHIJ")
_BY_TEXT = frozenset({"same text", "letter"})
_COPIED = "copied from the prompt"


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer with its column's text, option and kind; `problem` is the reason if it cannot be read."""

    text: str
    tokens: Tokens
    problem: str = ""
    column: str = ""
    letter: str = ""
    kind: str = "scalar"


def _kind(tokens: Tokens) -> str:
    """Return how to look for an answer: "letter" (A to J), "list" (several boxes may be its parts) or "scalar"."""
    if _letter(tokens) in _LETTERS:
        return "letter"
    try:
        is_list = form_of(tokens).kind in ("list", "set") and not why_undecided(tokens)
    except (Unreadable, TooComplex, RecursionError):
        return "scalar"
    return "list" if is_list else "scalar"


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their gold.
def read_gold(text: str) -> Gold:
    r"""Return the answer in a gold column's text.

    A gold may be a number, bare LaTeX, LaTeX in `$..$`, `\[..\]`, `\(..\)` or `\boxed{}`, or a worked solution with
    one box or one announced answer (`... #### 18`). Without an announcement the whole text is the answer, and never
    its first or last number, which would reward a fragment of `3\sqrt{13}`.
    """
    letter, bare = _option(without_brackets(_LEAD.sub("", text, count=1)))
    stated = announced_gold(bare)
    if stated is not None and stated.status != "ok":
        return Gold(text, (), f"{stated.status}: {stated.detail}")
    answer = _DEBRIS.sub("", bare if stated is None else stated.contents[0])
    answer = re.sub(r"\\text\{[^{}]*\Z", r"\g<0>}", answer)
    surplus = answer.count("}") - answer.count("\\}") - answer.count("{") + answer.count("\\{")
    answer = answer[:-1] if surplus > 0 and answer.endswith("}") else answer
    if len(answer) > MAX_GOLD_CHARS:
        return Gold(text, (), f"longer than {MAX_GOLD_CHARS} characters")
    try:
        tokens = tokenize(answer)
        check_length(tokens, MAX_GOLD_TOKENS)
    except (Unreadable, TooComplex) as error:
        return Gold(answer, (), str(error))
    num_words = len(_WORD.findall(answer))
    is_solution = num_words > _MAX_WORDS and any(map(is_number, tokens))
    problem = f"prose of {num_words} words without an announced answer" if is_solution else ""
    if tokens in ((WORDS + "nan",), ("n", "a", "n")):
        problem = "not a number"
    return Gold(answer, tokens, problem if tokens else "empty", text.strip(), letter, _kind(tokens))


class _Option(NamedTuple):
    """An option's letter, and its text."""

    letter: str
    text: str


def _option(text: str) -> _Option:
    """Return D and `[1, 2]` for the option `(D) [1, 2]`; "" and the text for anything else."""
    found = _OPTION.match(text)
    return _Option(found[1] or found[2] or found[3], text[found.end() :]) if found else _Option("", text)


@dataclass(frozen=True, slots=True)
class Math(Rule):
    r"""1.0 if the completion's answer is mathematically equal to the gold column's answer, else 0.0.

    `text.reader` and `mathematics.extract` look for the answer, `read_gold` reads the gold, `equal` compares them. An
    answer whose size or form means a long time is `too_long` or `too_complex` and earns 0.0; no clock decides this. If
    only the gold's exact text can be compared (`a_0 + \\ldots + a_n`, a sentence), answers are `undecided`, except
    numbers that the gold does not contain.

    An answer with the gold's value also earns 0.0 if it leaves work to do (`form`): it has an
    uncomputed number (`15 \\times 23`, `\\sum_{k=1}^{9} k`) and the gold has none; or it is not factored, expanded,
    simplified or a fraction as the task asks and the gold is; or it occurs in the prompt as a term. The gold's exact
    text is always right.

    Args:
        gold: Column with the right answer, or a list of answers, each of which is right.
        where: "after_think" reads the text after the last `</think>`; "all" reads the whole completion.
        multiple: How to read several different boxes: "reject" is a conflict (0.0), unless the gold is a list and they
            are its parts; "list" always takes them as one list; "last" takes the last box.
        form: "auto" also checks the form of an answer, by gold and prompt; "any" checks only the value.

    Example:
        >>> Math().score(Row(None, "so \\boxed{\\sqrt{117}}", None, {"answer": "3\\sqrt{13}"})).value
        1.0
    """

    tier: ClassVar[str] = "worker"
    judges_correctness: ClassVar[bool] = True

    gold: str = "answer"
    where: str = "after_think"
    multiple: str = "reject"
    form: str = "auto"

    def check(self) -> None:
        check_choice(self, "where", self.where, ("after_think", "all"))
        check_choice(self, "multiple", self.multiple, ("reject", "list", "last"))
        check_choice(self, "form", self.form, ("auto", "any"))
        check_column(self, "gold", self.gold)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.gold,)

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        """Return the first gold, or the answer of its solution, in a box; None if it is blank or not text."""
        text = next(iter(golds_of(columns[self.gold]) or ()), "")
        return None if not text.strip() else f"\\boxed{{{read_gold(text).text or text}}}"

    def warm_up(self) -> None:
        import mpmath  # noqa: F401  Slow to import.

    def cache_key(self, row: Row) -> Hashable | None:
        """Return the golds, the extracted answers, and the parts of the prompt that matter for their form."""
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
        gold = read_gold(text)
        if gold.problem:
            return Verdict(None, "gold_invalid", f"column '{self.gold}': {gold.problem}")
        found = self._extract(row, gold)
        if not found.contents:
            return Verdict(self.floor, found.status, found.detail)
        copied, asked = self._copied(row, found), self._asked(row)
        verdict = best(self._judge(gold, found.anchor, answer, copied, asked) for answer in found.contents)
        if found.status == "undecided" and verdict.value == 1.0:
            return Verdict(None, "undecided", f"'{found.anchor}': {found.detail}")
        return verdict

    def _extract(self, row: Row, gold: Gold) -> Candidate:
        return extract(row.text, self.where, self.multiple, gold.kind, (gold.column, gold.text))

    def _copied(self, row: Row, found: Candidate) -> bool:
        return self.form == "auto" and any(stands_in(answer, row.prompt) for answer in found.contents)

    def _asked(self, row: Row) -> frozenset[str]:
        return asked_forms(row.prompt) if self.form == "auto" else frozenset()

    def _judge(self, gold: Gold, anchor: str, answer: str, copied: bool, asked: frozenset[str]) -> Verdict:
        """Compare one answer with the gold.

        Args:
            gold: The gold.
            anchor: The announcement of the answer, for the detail.
            answer: The answer's text.
            copied: Whether an answer of this completion occurs in the prompt as a term.
            asked: Forms that the prompt asks for, such as "factored".
        """
        told = f"'{anchor}': {answer[:80]}; gold: {gold.text[:80]}"
        try:
            found = self._match(gold, answer, asked)
        except TooComplex as error:
            return Verdict(self.floor, "too_complex", f"{told}; {error}")
        except RecursionError:
            return Verdict(self.floor, "too_complex", f"{told}; nested too deeply")
        except Unreadable as error:
            return Verdict(self.floor, "no_answer", f"{told}; {error}")
        if found.same is None:
            return Verdict(None, "undecided", f"{told}; only the gold's own text can be compared: {found.path}")
        if not found.same:
            return Verdict(self.floor, "ok", f"{told}; {found.path}")
        if copied and found.path not in _BY_TEXT:
            return Verdict(self.floor, "ok", f"{told}; {_COPIED}")
        return Verdict(1.0, "ok", f"{told}; {found.path}")

    def _match(self, gold: Gold, answer: str, asked: frozenset[str]) -> Match:
        if answer.strip() == gold.column:
            return Match(True, "same text")
        letter, value = _option(answer)
        tokens = tokenize(value if letter == gold.letter else answer)
        if gold.letter and _letter(tokens) == gold.letter:
            return Match(True, "letter")
        if not tokens:
            raise Unreadable("empty")
        if tokens == gold.tokens:
            return compare(gold.tokens, tokens)
        found = _too_complex(gold, tokens) or _match_option(gold, tokens, answer) or compare(gold.tokens, tokens)
        if found.path == "decimal comma" and ", " in answer:
            return Match(False, "a list")
        if self.form == "auto" and found.same and found.path not in _BY_TEXT:
            reason = unfit(gold.tokens, tokens, asked)
            return Match(False, reason) if reason else found
        return found


def _too_complex(gold: Gold, tokens: Tokens) -> Match | None:
    """Raise TooComplex for such an answer; with a gold that cannot be compared, return that instead.

    It is the gold's fault, and a wrong answer must not earn more than a right answer.
    """
    try:
        check_answer(tokens)
    except TooComplex:
        if why_undecided(gold.tokens):
            return Match(None, why_undecided(gold.tokens))
        raise
    return None


def _match_option(gold: Gold, tokens: Tokens, answer: str) -> Match | None:
    r"""Compare the letter of an option with the gold's; None if the gold is no option.

    The gold is one if it is `(C)` or `\text{C}`, or C and the answer begins as an option: else C may be a constant.
    """
    letter = _letter(gold.tokens)
    is_option = tokens[1:2] in ((")",), (".",), (":",)) or tokens[2:3] == (")",)
    if letter not in _LETTERS or (gold.tokens == (letter,) and not is_option):
        return None
    # The text of the option may follow its letter, as in `\textbf{(C)} 12`.
    return Match(read_choice(f"answer is {answer}").value == letter, "letter")


def _letter(tokens: Tokens) -> str:
    return "".join(tokens).strip(WORDS + "()")
