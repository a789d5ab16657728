"""Try known cheats on a set of rules: none may pay more than an honest failure.

    bar = the larger of the totals of an empty completion and of an honest wrong answer in its best shape

No cheat may earn more than the bar, and no rule that judges correctness may give a cheat more than it gives those.
Where no rule judges correctness, the bar is the honest text.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.auditing.audit import data_rows, ideal_of, plain_numbers
from trl_ext.rewards.auditing.cheats import CHEATS, Cheat
from trl_ext.rewards.auditing.redteam_report import NOT_TRIED, REFUSED, Attempt, RedteamReport, worst
from trl_ext.rewards.auditing.redteam_rows import Target, honest, keywords_of, of_data, tags_of
from trl_ext.rewards.rows import completion_text
from trl_ext.rewards.ruleset import RuleSet
from trl_ext.rewards.text.prompt import question_text
from trl_ext.rewards.totals.explanation import Explanation

_ROUNDING = 1e-9
_BAR_DELAY_S = 2.0


def redteam(rules: RuleSet, rows: Any, shape: str | None = None, cheats: Sequence[Cheat] = CHEATS) -> RedteamReport:
    """Try every cheat on every row.

    Rules that count tokens get one made-up token per word and sign.

    Args:
        rules: The set. An exception in a rule is a finding here, whatever its `on_error` says.
        rows: A `datasets.Dataset`, or a list of rows as mappings: `prompt`, the columns that the rules read, and for
            rules of style `completion`, a good one. Each costs some 150 completions.
        shape: What a completion must look like, with `[answer]` and `[text]` in it, for rules that ask for a pattern.
        cheats: Which to try.

    Raises:
        ConfigError: A shape without an answer.
        DataError: A column is missing, no rule has a value for a row, or every gold is undecided.
    """
    from tqdm import tqdm

    if shape is not None and "[answer]" not in shape:
        raise ConfigError(f"shape is {shape!r}. Write [answer] where the answer stands, and [text] for the rest.")
    # A cheat that makes a rule raise would end a training run: a finding, not the end of this one.
    rules = replace(rules, on_error="floor")
    targets = of_data(rules.rules, data_rows(rows, rules, ("prompt", "completion")))
    courts = [_Court(rules, target, shape, row) for row, target in enumerate(targets)]
    decided = [court for court in courts if court.is_decided]
    if not decided:
        raise DataError("Every gold here is undecided, so no cheat differs from another answer. Give other rows.")
    attempts = []
    for cheat in tqdm(cheats, desc="Trying", unit=" cheats", delay=_BAR_DELAY_S):
        tried = filter(None, [court.attempt(cheat) for court in decided])
        attempts.append(worst([*tried]) or Attempt(cheat.name, None, "", None, None, NOT_TRIED))
    return RedteamReport(
        tuple(attempts),
        tuple(court.right for court in courts),
        tuple(court.bar for court in courts),
        sum(court.num_completions for court in courts),
        tuple(court.row for court in courts if not court.is_decided),
    )


class _Court:
    """One row: the most that may be earned on it, and what each cheat earns."""

    def __init__(self, rules: RuleSet, target: Target, shape: str | None, row: int):
        self.rules = rules
        self.target = target
        self.row = row
        self.num_completions = 0
        self._judging = [rule for rule in rules.rules if rule.judges_correctness]
        wrong = self._explained(self._honest(shape))
        bar = highest(explained.total for explained in wrong)
        if bar is None:
            raise DataError(f"Row {row}: no rule has a value there. Take it out, or mend it.\n{wrong[0]}")
        self.bar = bar
        self.is_decided = not any(part.status == "undecided" for explained in wrong for part in explained.parts)
        # The largest value that each judging rule gives to any of them.
        self._values = {rule.name: rule.floor for rule in self._judging}
        for part in (part for explained in wrong for part in explained.parts):
            if part.rule in self._values and part.value is not None:
                self._values[part.rule] = max(self._values[part.rule], part.value)
        self.right = self._right(shape)

    def _honest(self, shape: str | None) -> list[str]:
        """The honest completions that set the bar."""
        target, rules = self.target, self.rules.rules
        if self._judging:
            return ["", *honest(rules, target.wrong, shape)]
        good = [] if target.completion is None else [completion_text(target.completion)]
        return [*good, *honest(rules, target.gold or "so", shape)]

    def _right(self, shape: str | None) -> float | None:
        """The most that a right answer earns; None where no gold is known or no rule judges."""
        if self.target.gold is None or not self._judging:
            return None
        ideals = [ideal_of(rule, self.target.columns, self.row) for rule in self._judging]
        texts = [*filter(None, ideals), *honest(self.rules.rules, self.target.gold, shape)]
        return highest(explained.total for explained in self._explained(texts))

    def attempt(self, cheat: Cheat) -> Attempt | None:
        """Try the cheat on this row; None where it cannot be tried, or might be right by chance."""
        target = self.target
        if target.gold is None and "gold" in cheat.fields:
            return None
        fields = {
            "gold": target.gold or "",
            "wrong": target.wrong,
            "other": target.other,
            "prompt": question_text(target.prompt),
            "words": " ".join(keywords_of(self.rules.rules)),
            "tags": "".join(f"<{tag}></{tag}>" for tag in tags_of(self.rules.rules)),
        }
        completion = cheat.completion(fields)
        # The gold may stand there by design, or as one of the options that the prompt lists.
        is_listed = "prompt" in cheat.fields and target.gold in tuple("ABCDE")
        on_purpose = cheat.names_all or "gold" in cheat.fields or is_listed
        if target.gold is not None and not on_purpose and holds(completion, target.gold):
            return None
        (explained,) = self._explained([completion])
        return Attempt(cheat.name, self.row, completion, explained.total, self.bar, self._verdict(explained))

    def _verdict(self, explained: Explanation) -> str:
        for part in explained.parts:
            if part.status == "error":
                return f"rule '{part.rule}' raised"
            if part.value is not None and part.value > self._values.get(part.rule, part.value) + _ROUNDING:
                return f"rule '{part.rule}' gives {part.value:g}"
        if explained.total is None:
            return "no value: it takes its row out of training"
        return REFUSED if explained.total <= self.bar + _ROUNDING else "more than an honest try"

    def _explained(self, completions: Sequence[str]) -> list[Explanation]:
        self.num_completions += len(completions)
        prompt, columns = self.target.prompt, self.target.columns
        return [self.rules.explain(prompt, text, token_ids(text), **columns) for text in completions]


def highest(totals: Iterable[float | None]) -> float | None:
    """The largest total that is known; None without any."""
    return max((total for total in totals if total is not None), default=None)


def holds(completion: str, gold: str) -> bool:
    """True where the answer stands in the text as a word or number of its own."""
    text, answer = plain_numbers(completion), plain_numbers(gold)
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?!\w)", text) is not None


def token_ids(text: str) -> list[int]:
    """Made-up token ids: one per word and per sign."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in re.findall(r"\w+|[^\w\s]", text)]
