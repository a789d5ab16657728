"""Punish a completion that comes near the token limit: DAPO's soft overlong punishment."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row, Rule, Verdict, check_whole


@dataclass(frozen=True, slots=True)
class SoftOverlong(Rule):
    """0.0 while there is room, falling linearly over the last `soft_punish_cache` tokens to -1.0 at the limit.

    TRL's `get_soft_overlong_punishment` does the counting. A completion that is cut at the limit is exactly
    `max_completion_len` tokens long and earns -1.0.

    Args:
        max_completion_len: Tokens from which on the value is -1.0: give the trainer's `max_completion_length`.
        soft_punish_cache: Tokens before that limit over which the value falls.

    Example:
        >>> SoftOverlong(100, 20).score(Row(None, "", tuple(range(90)), {})).value
        -0.5

    Source: arXiv:2503.14476, equation 13.
    """

    floor: ClassVar[float] = -1.0
    ceiling: ClassVar[float] = 0.0
    tier: ClassVar[str] = "inline"

    max_completion_len: int
    soft_punish_cache: int

    def check(self) -> None:
        check_whole(self, "max_completion_len", self.max_completion_len, least=1)
        check_whole(self, "soft_punish_cache", self.soft_punish_cache)
        if self.soft_punish_cache > self.max_completion_len:
            above = f"soft_punish_cache={self.soft_punish_cache} is above max_completion_len={self.max_completion_len}"
            raise RuleError(f"Rule '{self.name}': {above}. Give soft_punish_cache <= max_completion_len.")

    def score(self, row: Row) -> Verdict:
        if row.completion_ids is None:
            raise RuleError("it counts tokens, but there are no completion_ids. Pass them, or use Length with words.")
        punish = punishment(self.max_completion_len, self.soft_punish_cache)
        value = float(punish([row.completion_ids])[0])
        return Verdict(value, "ok", f"{len(row.completion_ids)} of {self.max_completion_len} tokens")


@lru_cache(maxsize=64)
def punishment(max_completion_len: int, soft_punish_cache: int) -> Any:
    """Return TRL's reward function, imported here because rules must be readable without TRL."""
    from trl.rewards import get_soft_overlong_punishment

    return get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
