"""Match the completion with a user-written regular expression, under a time limit."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import regex

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.text.prose import MAX_CHARS


@dataclass(frozen=True, slots=True)
class Pattern(Rule):
    r"""1.0 when the text matches the pattern, else 0.0.

    The syntax is defined by the `regex` module, which extends `re`; begin with `(?s)` for a `.` that matches line
    breaks.

    Args:
        pattern: Regular expression.
        mode: "full" matches the whole text, without surrounding space; "search" matches some part of it.
        timeout_s: Processor seconds of the process after which the completion earns 0.0 with status `timeout`. Other
            busy threads and a slower machine can change the verdict, other processes cannot: write patterns that need
            no time limit, without nested repetition.

    Example:
        >>> Pattern(r"(?s).+\nA: -?\d+").score(Row(None, "9 * 2 = 18\nA: 18", None, {})).value
        1.0
    """

    tier: ClassVar[str] = "inline"

    pattern: str
    mode: str = "full"
    timeout_s: float = 0.1

    def check(self) -> None:
        check_choice(self, "mode", self.mode, ("full", "search"))
        check_number(self, "timeout_s", self.timeout_s, "seconds above 0", lambda seconds: seconds > 0)
        if not isinstance(self.pattern, str) or not self.pattern:
            raise RuleError(f"Rule '{self.name}': pattern is {self.pattern!r}. Give a regular expression.")
        try:
            compiled(self.pattern)
        except regex.error as error:
            raise RuleError(f"Rule '{self.name}': pattern {self.pattern!r} does not compile: {error}.") from error

    def score(self, row: Row) -> Verdict:
        if len(row.text) > MAX_CHARS:
            return Verdict(self.floor, "too_long", f"{len(row.text)} characters, at most {MAX_CHARS} are read")
        try:
            if self.mode == "search":
                found = compiled(self.pattern).search(row.text, timeout=self.timeout_s)
            else:
                found = compiled(self.pattern).fullmatch(row.text.strip(), timeout=self.timeout_s)
        except TimeoutError:
            return Verdict(self.floor, "timeout", f"no verdict within {self.timeout_s} s")
        except MemoryError:
            return Verdict(self.floor, "too_complex", "the match needs more memory than there is")
        return Verdict(float(found is not None), "ok", "match" if found else "no match")


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Return the compiled pattern, cached outside the rule so that the rule stays plain data."""
    return regex.compile(pattern)
