r"""Read the right answer from a gold column.

A gold may be a number, bare LaTeX, LaTeX in `$..$`, `\[..\]`, `\(..\)` or `\boxed{}`, or a worked solution with one
box or one announced answer (`... #### 18`). Where nothing is announced, the whole text is the answer and never the
first or last number in it, which would reward a fragment of `3\sqrt{13}`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from trl_ext.rewards.mathematics.bounds import MAX_GOLD_CHARS, TooComplex, Unreadable
from trl_ext.rewards.mathematics.comparison.equal import why_undecided
from trl_ext.rewards.mathematics.comparison.gate import check_gold
from trl_ext.rewards.mathematics.extract import announced_gold
from trl_ext.rewards.mathematics.form import form_of
from trl_ext.rewards.mathematics.tokens import WORDS, Tokens, tokenize

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # outside of commands
_MAX_WORDS = 8  # A longer gold without a box is prose, and prose is not compared.


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer; `problem` says why it cannot be read and is empty where it can."""

    text: str
    tokens: Tokens
    problem: str = ""

    @property
    def kind(self) -> str:
        """How an answer to it is looked for: "letter" for A to J, "list" where several boxes may be its parts."""
        return _kind(self.tokens)


@lru_cache(maxsize=4096)
def _kind(tokens: Tokens) -> str:
    letter = "".join(tokens).strip(WORDS + "()")
    if len(letter) == 1 and letter in "ABCDEFGHIJ":
        return "letter"
    try:
        is_list = form_of(tokens).kind in ("list", "set") and not why_undecided(tokens)
    except (Unreadable, TooComplex, RecursionError):
        return "scalar"
    return "list" if is_list else "scalar"


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their gold.
def read_gold(text: str) -> Gold:
    """Return the answer in a gold column's text."""
    stated = announced_gold(text)
    if stated is not None and stated.status != "ok":
        return Gold(text, (), f"{stated.status}: {stated.detail}")
    answer = text if stated is None else stated.answers[0]
    if len(answer) > MAX_GOLD_CHARS:
        return Gold(text, (), f"longer than {MAX_GOLD_CHARS} characters")
    try:
        tokens = tokenize(answer)
        check_gold(tokens)
    except (Unreadable, TooComplex) as error:
        return Gold(answer, (), str(error))
    return Gold(answer, tokens, _problem(answer, tokens))


def _problem(text: str, tokens: Tokens) -> str:
    if not tokens:
        return "empty"
    if tokens == (WORDS + "nan",) or tokens == ("n", "a", "n"):
        return "not a number"
    words = len(_WORD.findall(text))
    return f"prose of {words} words without an announced answer" if words > _MAX_WORDS else ""
