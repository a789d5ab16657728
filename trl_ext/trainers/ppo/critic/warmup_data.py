"""Scored completions of a file, from which the critic learns in its warm-up in the place of sampled ones.

One JSON object a line: `prompt` (text or messages), `completion` (text or one assistant message) and, in all lines or
in none, `score`: the number that the run's rules and reward models would give. Other keys are columns for the rules.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trl_ext.errors import DataError

# Columns of the run's own datasets that would take the place of the text.
_NOT_OURS = ("input_ids", "attention_mask", "image", "images", "completion_ids", "environment")


@dataclass(frozen=True)
class WarmupData:
    """Prompts with completions.

    Args:
        rows: As they stand in the file.
        seed: Of their order.
    """

    rows: Sequence[dict[str, Any]]
    seed: int

    @property
    def has_scores(self) -> bool:
        return "score" in self.rows[0]

    def of_update(self, number: int, rank: int, num_ranks: int, num_rows: int) -> list[dict[str, Any]]:
        """Return a rank's rows of an update, counted from 0; when all have been there, they come in a new order."""
        first = (number * num_ranks + rank) * num_rows
        return [self._at(place) for place in range(first, first + num_rows)]

    def _at(self, place: int) -> dict[str, Any]:
        epoch, index = divmod(place, len(self.rows))
        return self.rows[_order(self.seed, epoch, len(self.rows))[index]]


@lru_cache(maxsize=2)  # an update may end one epoch and begin the next
def _order(seed: int, epoch: int, num_rows: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def completion_ids(rows: Sequence[dict[str, Any]], tokenizer: Any, eos: int, max_tokens: int) -> list[list[int]]:
    """Return the tokens of the rows' completions: `eos` at the end of those that have room for it, longer ones cut."""
    ids = tokenizer([row["completion"] for row in rows], add_special_tokens=False)["input_ids"]
    return [list(own)[:max_tokens] if len(own) >= max_tokens else [*own, eos] for own in ids]


def read_warmup_data(path: str, seed: int) -> WarmupData:
    """Read a file of JSON lines.

    Raises:
        DataError: for a file that is not there or empty, and for its first line that is wrong.
    """
    name = f"critic_warmup_data={path!r}"
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {error}. Give a file of JSON lines, in UTF-8.") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _parsed(line)
        if problem := _problem(row, rows):
            raise DataError(
                f"{name}, line {number}: {problem}. A line is such as "
                '{"prompt": "2 + 3 =", "completion": " 5", "score": 1.0}.'
            )
        kept = {key: value for key, value in row.items() if key not in _NOT_OURS}
        rows.append(kept | {"completion": _text(row["completion"])})
    if not rows:
        raise DataError(f"{name} has no line. Give prompts with completions, or leave it out.")
    return WarmupData(rows, seed)


def _parsed(line: str) -> Any:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a character has no tokens
    except (ValueError, RecursionError):
        return None
    return row


def _problem(row: Any, before: Sequence[dict[str, Any]]) -> str:
    """Say what is wrong with a line; empty if nothing is."""
    if not isinstance(row, dict):
        return "not a JSON object"
    prompt = row.get("prompt")
    if not prompt or not (isinstance(prompt, str) or _are_messages(prompt)):
        return "the prompt is neither text nor messages"
    if _text(row.get("completion")) is None:
        return "the completion is neither text nor one assistant message"
    if not before:
        return _problem_of_score(row) if "score" in row else ""
    if isinstance(prompt, str) != isinstance(before[0]["prompt"], str):
        return "the prompts are text in some lines and messages in others"
    if ("score" in row) != ("score" in before[0]):
        return "some lines have a score and others have none"
    return _problem_of_score(row) if "score" in row else ""


def _problem_of_score(row: dict[str, Any]) -> str:
    score = row["score"]
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    # An integer may be too large for a float.
    is_fine = is_number and abs(score) < 1e30 and math.isfinite(score)
    return "" if is_fine else f"the score is {str(score)[:40]!r}, which is no finite number"


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def _text(completion: Any) -> str | None:
    """Return the text of a completion; None if it has none."""
    if isinstance(completion, str):
        return completion
    if _are_messages(completion) and len(completion) == 1 and completion[0]["role"] == "assistant":
        return str(completion[0]["content"])
    return None
