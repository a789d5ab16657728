"""Judge whether the completion is as long as it should be."""

from dataclasses import dataclass
from typing import ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_whole
from trl_ext.rewards.text.prose import seen, words

UNITS = ("tokens", "chars", "words")


@dataclass(frozen=True, slots=True)
class Length(Rule):
    """1.0 for low..high units, falling linearly to 0.0 over `slack` units on either side.

    In "chars" and "words" invisible characters and repeated spaces count only towards `high`. Tokens always count.
    With low=0 an empty completion earns 1.0: give a `low`, or a gate.

    Args:
        low, high: Bounds in units, both included.
        slack: Units over which the value falls; 0 is a hard limit.
        unit: "tokens" (the completion's ids, end-of-sequence token included), "chars" or "words".

    Example:
        >>> Length(high=4, slack=4, unit="chars").score(Row(None, "abcdef", None, {})).value
        0.5
    """

    tier: ClassVar[str] = "inline"

    low: int = 0
    high: int = 512
    slack: int = 0
    unit: str = "tokens"

    def check(self) -> None:
        for key in ("low", "high", "slack"):
            check_whole(self, key, getattr(self, key))
        check_choice(self, "unit", self.unit, UNITS)
        if self.low > self.high:
            raise RuleError(f"Rule '{self.name}': low={self.low} is above high={self.high}. Give low <= high.")

    def score(self, row: Row) -> Verdict:
        if self.unit != "tokens":
            length = len(row.text) if self.unit == "chars" else len(words(row.text))
        elif row.completion_ids is None:
            raise RuleError("unit is 'tokens', but there are no completion_ids. Pass them, or use unit='words'.")
        else:
            length = len(row.completion_ids)
        filled = length
        if 0 < self.low <= length and self.unit != "tokens":
            filled = len(seen(row.text)) if self.unit == "chars" else len(words(seen(row.text)))
        distance = max(self.low - filled, length - self.high, 0)
        value = 1.0 if distance == 0 else max(0.0, 1.0 - distance / self.slack) if self.slack else 0.0
        hidden = f", {filled} without padding" if filled < self.low <= length else ""
        return Verdict(value, "ok", f"{length} {self.unit}{hidden}")
