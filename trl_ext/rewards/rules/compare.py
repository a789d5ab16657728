"""Compare the completions of a group by a judge: in pairs, or all in one order."""

import asyncio
import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

from trl_ext.rewards.base.rule import Row, Verdict, check_choice, check_whole
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.rewards.rules.model_judge import ModelJudge, Shown, both_orders
from trl_ext.rewards.text.prose import is_blank, text_part


@dataclass(frozen=True, slots=True)
class Compare(ModelJudge):
    """The share of the group's other completions that are worse than this completion; an equal counts a half.

    Equal texts are equally good, and a completion without others earns 0.5. A blank or too long completion is not
    shown, and loses to all. After an unreadable reply all completions of the order or pair lose; without any readable
    reply a completion is `no_score`. See `judge` for the rest.

    Args:
        method: "pairs" asks about two completions at a time, in both orders; "rank" shows all completions, and asks
            for their order.
        opponents: With "pairs", an even number of opponents of each completion: its neighbours in a ring that is
            sorted by a digest of the text. 0: all others.
    """

    reads_group: ClassVar[bool] = True

    method: str = "pairs"
    opponents: int = 0

    def check(self) -> None:
        check_choice(self, "method", self.method, ("pairs", "rank"))
        check_whole(self, "opponents", self.opponents)
        if self.opponents % 2 or (self.opponents and self.method == "rank"):
            self._refuse(f"opponents is {self.opponents}. Give an even number, and none with method rank.")
        ModelJudge.check(self)

    @property
    def _mode(self) -> str:
        return "pair" if self.method == "pairs" else "rank"

    def cache_key(self, row: Row) -> Hashable | None:
        return AsyncRule.cache_key(self, row)

    async def score(self, row: Row) -> Verdict:  # type: ignore[override]
        at_once = self._verdict_at_once(row)
        if at_once or self.method == "rank":
            return at_once or await self._judged(self._requests(row))
        texts, text = self._texts(row), text_part(row.text, self.where)
        own, near = texts.index(text), self.opponents // 2
        all_meet = not near or 2 * near >= len(texts) - 1
        steps = range(1, len(texts)) if all_meet else [step for step in range(-near, near + 1) if step]
        met = [texts[(own + step) % len(texts)] for step in steps]
        pairs = (self._requests(row, both_orders(text, other)) for other in met)
        verdicts = await asyncio.gather(*(self._judged(pair) for pair in pairs))
        if all(verdict.status != "ok" for verdict in verdicts):
            return next((verdict for verdict in verdicts if verdict.status == "refused"), verdicts[0])
        results = {text: verdict.value or 0.0 for text, verdict in zip(met, verdicts, strict=True)}
        told = ", ".join(f"{value:.3g}" for value in results.values())
        return Verdict(self._share(row, results), "ok", f"against {len(met)} others: {told}")

    def _is_shown(self, text: str) -> bool:
        return len(text) <= self.max_chars and not is_blank(text)

    def _texts(self, row: Row) -> list[str]:
        """Return the group's different texts that are shown, in the same order for all of its rows."""
        texts = {text_part(one.text, self.where) for one in (row, *row.group)}
        return sorted(
            filter(self._is_shown, texts), key=lambda text: hashlib.blake2b(text.encode("utf-8", "replace")).digest()
        )

    def _share(self, row: Row, results: Mapping[str, float]) -> float:
        """Return the mean result against the others; `results` is by text, others without a result are left out."""
        known = {text_part(row.text, self.where): 0.5, **results}
        others = (text_part(one.text, self.where) for one in row.group)
        return fmean(known.get(text, 1.0) for text in others if text in known or not self._is_shown(text))

    def _verdict_at_once(self, row: Row) -> Verdict | None:
        if at_once := ModelJudge._verdict_at_once(self, row):
            return at_once
        if not row.group:
            return Verdict(0.5, "ok", "alone in its group")
        return None if len(self._texts(row)) > 1 else Verdict(self._share(row, {}), "ok", "no other is to be judged")

    def _shown(self, row: Row, given: Mapping[str, Any]) -> Shown:
        texts = self._texts(row)
        return [({"answers": texts}, partial(self._in_order, row, texts))]

    def _in_order(self, row: Row, texts: list[str], said: Any) -> float | None:
        """Return the value of a row by an order such as "2 > 1 = 3"; None if the order omits an answer."""
        ranks = {number.strip(): rank for rank, same in enumerate(str(said).split(">")) for number in same.split("=")}
        numbers = [str(number) for number in range(1, len(texts) + 1)]
        if sorted(numbers) != sorted(number.strip() for number in re.split("[>=]", str(said))):
            return None
        own = ranks[numbers[texts.index(text_part(row.text, self.where))]]
        places = (ranks[number] for number in numbers)
        results = {text: (own < place) + (own == place) / 2 for text, place in zip(texts, places, strict=True)}
        return self._share(row, results)
