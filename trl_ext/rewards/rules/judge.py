"""Judge a completion by a language model on an OpenAI-compatible server, alone or against another answer."""

import re
import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Verdict, check_texts, check_whole, is_finite, pair_of
from trl_ext.rewards.rules.model_judge import JudgeReply, JudgeRequest, ModelJudge, Shown

_LONGEST_LINE = 500  # characters of a reply's last line
_PATTERN_S = 0.5
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?")


@dataclass(frozen=True, slots=True)
class Judge(ModelJudge):
    """A language model's score as a share, 0.0 for the lowest of `scores` and 1.0 for the highest.

    With `against` the value is a preference: 1.0 for the completion, 0.0 for the other answer, 0.5 for a tie. The
    judge votes `votes` times, and the median counts: of two values, the majority. With `against` each vote is the
    mean of both orders, because judges favour a position.

    A row has no value if the server fails (`infra_error`), or its gold or other answer is missing (`gold_invalid`). A
    reply of another form is `no_score`, a request that the server refuses is `refused`; both earn 0.0, because a
    completion can cause them.

    Args:
        template: Jinja template of the request. Names are `prompt`, `completion`, `messages` (its turns with tool
            calls), `gold`, `tag` (a code for tags that the completion cannot foresee), with `against` also `first` and
            `second`; any other name is a column. Empty: question, right answer if the row has it, and answer, each
            between tags.
        against: Column with the answer to compare with. Empty: the completion is judged alone.
        scores: Lowest and highest score that the judge may give.
        choices: Words with their values, 0.0 to 1.0, such as `{"yes": 1, "no": 0}`; the judge chooses a word instead
            of a score. Empty: it gives a score.
        pattern: Regular expression for the last line of a reply without JSON; its first group is the score, a word of
            `choices`, or "A", "B" or "tie". The rubric must ask for such a line.
        votes: Votes of the judge; odd.

    Example:
        `RuleSet([Answer(), Judge("Qwen/Qwen3-8B", rubric="Polite, and in plain words.", weight=0.3, gate="answer")])`
    """

    against: str = ""  # type: ignore[misc]
    scores: tuple[float, float] = (1.0, 10.0)  # type: ignore[misc]
    choices: Mapping[str, float] | None = None  # type: ignore[misc]
    pattern: str = ""  # type: ignore[misc]
    votes: int = 1  # type: ignore[misc]

    @property
    def judges_correctness(self) -> bool:  # type: ignore[override]
        """True if the judge is shown the right answer; else it judges the form."""
        return bool(self.gold)

    def check(self) -> None:
        check_texts(self, "against", "pattern")
        ModelJudge.check(self)
        object.__setattr__(self, "scores", pair_of(f"Rule '{self.name}'", "scores", self.scores))
        if self.choices is not None:
            self._check_choices(self.choices)
        if self.pattern and not self.rubric:
            self._refuse("there is a pattern. Give a rubric, too, that asks the judge for such a last line.")
        try:
            groups = not self.pattern or regex.compile(self.pattern).groups
        except regex.error as error:
            raise RuleError(f"Rule '{self.name}': {self.pattern!r} is no regular expression: {error}.") from error
        if not groups:
            self._refuse(f"pattern is {self.pattern!r}. Put the score in a group, such as Score: (\\d+).")
        check_whole(self, "votes", self.votes, 1)
        if self.votes % 2 == 0:
            self._refuse(f"votes is {self.votes}. Give an odd number, so that there is a majority.")
        if self.votes > 1 and self.temperature == 0:
            self._refuse(f"{self.votes} votes at temperature 0 are one vote. Give a temperature above 0.")

    def _check_choices(self, choices: Any) -> None:
        words = dict(choices) if isinstance(choices, Mapping) else {}
        different = {word.strip().casefold() for word in words if isinstance(word, str) and word.strip()}
        if len(different) < max(2, len(words)) or not all(
            is_finite(value) and 0 <= value <= 1 for value in words.values()
        ):
            self._refuse(
                f"choices is {choices!r}. Give two or more different words, each with a value from 0 to 1; in YAML "
                "put yes, no, on and off in quotes."
            )
        if self.against or self.scores != (1.0, 10.0):
            self._refuse("there are choices and scores, or against. Give only scores, only choices or only against.")

    @property
    def _mode(self) -> str:
        return "pair" if self.against else "alone"

    def _shown(self, row: Row, given: Mapping[str, Any]) -> Shown:
        if not self.against:
            return [({}, self._value_of)]
        own, other = given["completion"], given[self.against]
        return [
            ({"first": own, "second": other}, partial(preference, 1.0)),
            ({"first": other, "second": own}, partial(preference, 0.0)),
        ]

    def _verdict(self, replies: Sequence[JudgeReply], requests: Sequence[JudgeRequest]) -> Verdict:
        """Return the median of the votes, each the mean over requests. Replies are ordered by vote, then request."""
        num_orders = len(requests)
        found = [self._value(reply, requests[place % num_orders]) for place, reply in enumerate(replies)]
        if all(value is None for value in found):
            return self._no_score(replies)
        values = [self.floor if value is None else value for value in found]
        votes = [statistics.fmean(values[place : place + num_orders]) for place in range(0, len(values), num_orders)]
        shown = ", ".join("none" if value is None else f"{value:.3g}" for value in found)
        first = next(reply for reply, value in zip(replies, found, strict=True) if value is not None)
        return Verdict(statistics.median(votes), "ok", f"{shown}: {self._end_of(first)}")

    def _value_of(self, said: Any) -> float | None:
        """Return the value of a reply's score, 0.0 to 1.0; None if it is no score."""
        if self.choices:
            words = {word.strip().casefold(): float(value) for word, value in self.choices.items()}
            return words.get(str(said).strip().casefold())
        if isinstance(said, str):
            said = float(said) if _NUMBER.fullmatch(said.strip()) else None
        if isinstance(said, bool) or not isinstance(said, int | float):
            return None
        low, high = self.scores
        # A score out of bounds is no score, and not the best or the worst: the judge did not follow the request.
        return (said - low) / (high - low) if low <= said <= high else None

    def _said(self, text: str, shown: str) -> Any:
        """Return the score in a reply's JSON, or in its last line if there is a pattern; None without a score."""
        if not self.pattern:
            return ModelJudge._said(self, text, shown)
        last = next((line for line in reversed(text.split("\n")) if line.strip()), "")
        bare = unicodedata.normalize("NFKC", last).strip().strip("*_#`").strip()  # also of full-width signs
        if len(bare) > _LONGEST_LINE:
            return None
        try:
            match = regex.compile(self.pattern).fullmatch(bare, timeout=_PATTERN_S)
        except TimeoutError:
            return None
        return match and match[1]


def preference(value_of_a: float, said: Any) -> float | None:
    """Return the value of "A", "B" or "tie"; None for anything else."""
    return {"a": value_of_a, "b": 1.0 - value_of_a, "tie": 0.5}.get(str(said).lower())
