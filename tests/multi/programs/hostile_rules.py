"""Rules that misbehave on some completions, in every way that a user's rule has misbehaved."""

import os
import time
import zlib
from dataclasses import dataclass

from trl_ext.rewards import Row, Rule, Verdict

WAYS = ("raise", "hang", "spin", "string", "nan", "exit", "kill")


@dataclass(frozen=True, kw_only=True)
class Misbehaves(Rule):
    """0 or 1 by the completion's text, but one text in eight sees the rule misbehave.

    Args:
        way: How.
    """

    way: str = "raise"

    def score(self, row: Row) -> Verdict:
        number = zlib.crc32(row.text.encode())
        if number % 8 == 0:
            return misbehave(self.way)
        return Verdict(float(number % 2))


def misbehave(way: str):
    if way == "raise":
        raise KeyError("gold")
    if way == "hang":
        time.sleep(3600)
    while way == "spin":
        pass
    if way == "exit":
        raise SystemExit(1)
    if way == "kill":
        os._exit(1)
    return Verdict(float("nan")) if way == "nan" else "1.0"
