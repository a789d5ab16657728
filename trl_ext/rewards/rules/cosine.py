"""Let a value fall or rise with the length along a cosine: the length part of the cosine-scaled reward."""

import math
from dataclasses import dataclass
from typing import ClassVar

from trl_ext.rewards.rule import Row, Rule, Verdict, check_choice, check_number, check_whole
from trl_ext.rewards.rules.length import UNITS, length_in
from trl_ext.rewards.text.prose import is_blank


@dataclass(frozen=True, slots=True)
class Cosine(Rule):
    r"""`short` at length 0, `long` at `max_len` and beyond, and half a cosine between the two.

        value = long + (short - long) / 2 * (1 + cos(pi * min(n / max_len, 1)))

    Give it a gate: ungated it pays for short wrong answers. TRL's `get_cosine_scaled_reward` is this formula behind a
    grader of its own, which reads no other column and has no time limit in threads; here any rule can be the grader.
    Its whole reward, with other values for wrong answers (-1.0 to -0.5) than for right ones (1.0 to 0.5), is the sum
    of two rules, because the formula is linear in its ends:

        rules:
          - {rule: answer, weight: 0}
          - {rule: cosine, max_len: 1024, short: -1.0, long: -0.5}
          - {rule: cosine, max_len: 1024, short: 2.0, long: 1.0, gate: answer, name: cosine_right}

    Args:
        max_len: Length from which on the value is `long`.
        short, long: Values at the ends. A blank completion earns the lower of the two with status `no_answer`.
        unit: "tokens" (the completion's ids, end-of-sequence token included), "chars" or "words".

    Example:
        >>> Cosine(max_len=100).score(Row(None, "A: 18", tuple(range(50)), {})).value
        0.75

    Source: arXiv:2502.03373, appendix C.1.
    """

    tier: ClassVar[str] = "inline"

    max_len: int
    short: float = 1.0
    long: float = 0.5
    unit: str = "tokens"

    @property
    def floor(self) -> float:  # type: ignore[override]
        """The lower of the two ends."""
        return float(min(self.short, self.long))

    @property
    def ceiling(self) -> float:  # type: ignore[override]
        """The higher of the two ends."""
        return float(max(self.short, self.long))

    def check(self) -> None:
        check_whole(self, "max_len", self.max_len, least=1)
        check_number(self, "short", self.short)
        check_number(self, "long", self.long)
        check_choice(self, "unit", self.unit, UNITS)

    def score(self, row: Row) -> Verdict:
        length = length_in(self.unit, row)
        if is_blank(row.text):
            return Verdict(self.floor, "no_answer", "empty")
        # Clamped, because the cosine would climb again beyond max_len.
        cosine = math.cos(math.pi * min(length / self.max_len, 1.0))
        value = self.long + 0.5 * (self.short - self.long) * (1.0 + cosine)
        return Verdict(value, "ok", f"{length} of {self.max_len} {self.unit}")
