"""Does the completion match a pattern: user-written regular expressions under a time limit."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row, Rule, Verdict, check_number


@dataclass(frozen=True, slots=True)
class Format(Rule):
    r"""1.0 when the whole text, without surrounding space, matches the pattern, else 0.0.

    The `regex` module's syntax, which extends `re`; write `(?s)` in front for a `.` that matches line breaks.

    Args:
        pattern: Regular expression.
        timeout_s: Seconds of the process's processor time before a match is given up; the completion then earns 0.0
            with status `timeout`. A loaded machine does not change the verdict, other busy threads do.

    Example:
        >>> Format(r"(?s).+\nA: -?\d+").score(Row(None, "9 * 2 = 18\nA: 18", None, {})).value
        1.0
    """

    pattern: str
    timeout_s: float = 0.1

    def check(self) -> None:
        check_number(self, "timeout_s", self.timeout_s)
        if self.timeout_s <= 0:
            raise RuleError(f"Rule '{self.name}': timeout_s is {self.timeout_s}. Give seconds above 0.")
        if not isinstance(self.pattern, str) or not self.pattern:
            raise RuleError(f"Rule '{self.name}': pattern is {self.pattern!r}. Give a regular expression.")
        try:
            compiled(self.pattern)
        except regex.error as error:
            raise RuleError(f"Rule '{self.name}': pattern {self.pattern!r} does not compile: {error}.") from error

    def score(self, row: Row) -> Verdict:
        try:
            match = compiled(self.pattern).fullmatch(row.text.strip(), timeout=self.timeout_s)
        except TimeoutError:
            return Verdict(self.floor, "timeout", f"no verdict within {self.timeout_s} s")
        return Verdict(float(match is not None), "ok", "match" if match else "no match")


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """The compiled pattern, kept outside the rule so that the rule stays plain data."""
    return regex.compile(pattern)
