"""Score the answer to a procedural task with the scorers of reasoning-gym.

The library makes tasks of about a hundred families and scores answers to them. The row carries its task, as the entry
that the library made. A scorer sees an answer only after `procedural_guard` has looked at it.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.rule import Row, Rule, Verdict, check_column, check_flag
from trl_ext.rewards.rules import procedural_guard as guard
from trl_ext.rewards.text.visible import after_think

Scorer = Callable[[str, dict[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Procedural(Rule):
    """The score, 0.0 to 1.0, that reasoning-gym gives to the completion's answer.

    The answer is the text behind the last `<answer>`, else the last line, or, where the entry's own answer has several
    lines (a board), as many last lines. Only the text behind the last `</think>` is read.

    A row has no value (`gold_invalid`) when its entry's family is unknown or has a scorer that pays for any answer
    (`procedural_guard.FAULTY`), or when the scorer does not give 1.0 to the entry's own answer.

    Args:
        entry: Column with the library's entry, as JSON text (`json.dumps(entry, default=str)`) or as a mapping.
            Text is the safer one: the `datasets` library fills mappings of different shape with nulls.
        dataset: Family of all entries, such as "chain_sum"; None reads `entry["metadata"]["source_dataset"]`.
        configs: Each family's configuration, for the few scorers that read it (tolerances, bounds). A family that is
            not named here has the library's defaults.
        partial: True counts a score between 0 and 1, False makes it 0.0. Many families give 0.01 to 0.05 to any
            answer, and some a share for parts of the right one.

    Example:
        >>> entry = '{"question": "4 + 3 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}'
        >>> Procedural().score(Row(None, "<answer>7</answer>", None, {"entry": entry})).value
        1.0
    """

    # Size limits bound the time of most scorers, but SymPy may take long to simplify a short formula.
    tier: ClassVar[str] = "worker"
    judges_correctness: ClassVar[bool] = True

    entry: str = "entry"
    dataset: str | None = None
    configs: Mapping[str, Mapping[str, Any]] | None = None
    partial: bool = True

    def check(self) -> None:
        check_flag(self, "partial", self.partial)
        check_column(self, "entry", self.entry)
        if self.configs is not None and not isinstance(self.configs, Mapping):
            raise RuleError(f"Rule '{self.name}': configs is {self.configs!r}. Give families with their settings.")
        families = [*(self.configs or ()), *([] if self.dataset is None else [self.dataset])]
        for family in families:
            try:
                scorer(family, self._config(family))
            except (TypeError, ValueError, AssertionError) as error:
                raise RuleError(
                    f"Rule '{self.name}': family {family!r} cannot be used: {error}. Give one of "
                    "reasoning_gym.factory.DATASETS and keys of its configuration."
                ) from error
        library()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.entry,)

    def score(self, row: Row) -> Verdict:
        try:
            cell = row.columns[self.entry]
            if not isinstance(cell, str | Mapping):
                raise TypeError(f"{type(cell).__name__} is neither JSON text nor a mapping")
            # As text: a few entries carry a Fraction that no scorer reads.
            text = cell if isinstance(cell, str) else json.dumps(cell, default=str)
            family = self.dataset or str(json.loads(text)["metadata"]["source_dataset"])
            config = self._config(family)
            require_sound(family, config, text)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            return Verdict(None, "gold_invalid", f"column '{self.entry}': {error}"[:300])
        entry = guard.read_entry(family, text)
        answer = find_answer(row.text, entry["answer"])
        if not answer and (entry["answer"] != "" or "<answer>" not in row.text):  # An empty answer may be right.
            return Verdict(self.floor, "no_answer", "no answer")
        if len(answer) > guard.MAX_CHARS:
            return Verdict(self.floor, "too_long", f"{len(answer)} of at most {guard.MAX_CHARS} characters")
        if not guard.answer_is_safe(family, answer, entry):
            return Verdict(self.floor, "no_answer", f"{family}: {answer[:60]!r} is not of the form that is read")
        return self._scored(family, config, answer, entry)

    def _scored(self, family: str, config: str, answer: str, entry: dict[str, Any]) -> Verdict:
        # The entry is sound, so an error of the scorer is about the answer.
        try:
            value = float(scorer(family, config)(answer, entry))
        except (RecursionError, MemoryError, OverflowError) as error:
            return Verdict(self.floor, "too_complex", f"{family}: {type(error).__name__}")
        except Exception as error:
            return Verdict(self.floor, "no_answer", f"{family}: {type(error).__name__}: {error}"[:200])
        if not math.isfinite(value):
            return Verdict(self.floor, "not_finite", f"{family} gave {value}")
        value = min(max(value, 0.0), 1.0)
        return Verdict(value if self.partial or value == 1.0 else self.floor, "ok", f"{family}: {answer[:60]!r}")

    def _config(self, family: str) -> str:
        return json.dumps(dict((self.configs or {}).get(family, {})), sort_keys=True)


def library() -> Any:
    """Return the module `reasoning_gym`, or raise SupportError."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise SupportError("procedural needs reasoning-gym. Run: pip install 'trl_ext[procedural]'.") from error
    return reasoning_gym


@lru_cache(maxsize=256)
def scorer(family: str, config: str) -> Scorer:
    """Return the scorer of a family under a configuration (JSON text); ValueError for a family that is not used."""
    if family in guard.FAULTY:
        raise ValueError(f"its scorer is not used: {guard.FAULTY[family]}")
    found: Scorer = library().create_dataset(family, **json.loads(config)).score_answer
    if guard.runs_code(family, found):
        raise ValueError("its scorer runs text as code, and this rule does not know which")
    return found


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their entry.
def require_sound(family: str, config: str, text: str) -> None:
    """Raise ValueError, KeyError or TypeError unless the family's scorer gives 1.0 to the entry's own answer.

    Most scorers catch any error and call the answer wrong, so a broken entry would show nowhere else.
    """
    entry = guard.read_entry(family, text)
    answer = entry["answer"]
    score = scorer(family, config)
    if not isinstance(entry["metadata"], dict) or not guard.entry_is_safe(family, entry):
        raise ValueError(f"the entry does not belong to family {family}")
    if answer is None:  # Some families have tasks with many answers and give none.
        return
    if not isinstance(answer, str) or not guard.answer_is_safe(family, answer, entry):
        raise ValueError(f"the entry's answer {answer!r} is not a text that {family} reads")
    try:
        value = score(answer, entry)
    except Exception as error:
        raise ValueError(f"{family} raised {type(error).__name__} on the entry's own answer: {error}") from error
    if value != 1.0:
        raise ValueError(f"{family} gives {value} to the entry's own answer {answer[:60]!r}")


def find_answer(text: str, gold: str | None) -> str:
    """Return the text behind the last `<answer>`, else as many last lines as the gold has.

    Other announcements are not read: "####" and "A:" are also parts of boards.

    Example:
        >>> find_answer("9 + 9 =\\n18", "18"), find_answer("<answer>1 2\\n3 4</answer>", "1 2\\n3 4")
        ('18', '1 2\\n3 4')
    """
    text = after_think(text)
    _, tag, behind = text.rpartition("<answer>")
    if tag:
        return behind.partition("</answer>")[0].strip()
    num_lines = 1 + (gold or "").strip().count("\n")
    return "\n".join(text.strip().rsplit("\n", num_lines)[-num_lines:]).strip()
