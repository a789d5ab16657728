"""Sampled and greedy completions of held-out prompts, from the tables that PPO's evaluations write.

A table is a file of JSON lines in the run's folder `completions`, one completion a line, with the keys
    step, decoding ("sampled" or "greedy"), prompt, completion, score
    rewards/<name>                the value of a reward function or model
    rule_trace, rule_columns      as in TRL's tables (see `samples.py`)
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.monitor.log_keys import WHOLE_SET
from trl_ext.monitor.pages.samples import (
    COMPLETIONS_FOLDER,
    RulePart,
    conversation_text,
    evenly,
    finite,
    json_mapping,
    trace_parts,
)

MOST_PROMPTS = 12
MOST_ANSWERS = 2  # of a prompt, for each decoding
_NAME = re.compile(r"held_out_(\d+)(.*)\.jsonl")
_REWARD = "rewards/"


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """A completion with its score (None if it has none) and the value of each rule and reward model."""

    decoding: str
    completion: str
    score: float | None
    parts: tuple[RulePart, ...]


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt with its completions and the dataset's cells that rules read."""

    prompt: str
    gold: Mapping[str, str]
    answers: tuple[HeldOutAnswer, ...]


@dataclass(frozen=True, slots=True)
class HeldOutTable:
    """The last evaluation's completions.

    Args:
        prompts: Prompts on the page, of `num_prompts` in all.
        step: Optimizer step of the evaluation, None without a table.
        damaged: Names of tables that could not be read.
    """

    prompts: Sequence[HeldOutPrompt] = field(default=())
    step: int | None = None
    num_prompts: int = 0
    damaged: tuple[str, ...] = ()


def read_held_out(folder: Path) -> HeldOutTable:
    """Read the completions of the last evaluation from a run's folder."""
    tables = (folder / COMPLETIONS_FOLDER).glob("held_out_*.jsonl")
    found = [(int(match[1]), path) for path in tables if (match := _NAME.fullmatch(path.name))]
    if not found:
        return HeldOutTable()
    step = max(number for number, _ in found)
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    damaged = []
    for path in sorted(path for number, path in found if number == step):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for row in rows:
                by_prompt.setdefault(conversation_text(row["prompt"]), []).append(row)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            damaged.append(f"{path.name}: {' '.join(str(error).split())[:200]}")
    shown = []
    for prompt, rows in evenly(list(by_prompt.items()), MOST_PROMPTS):
        answers: dict[str, list[HeldOutAnswer]] = {}
        for row in rows:
            some = answers.setdefault(str(row.get("decoding", "")), [])
            if len(some) < MOST_ANSWERS:
                some.append(_answer(row))
        gold = {str(name): str(cell) for name, cell in json_mapping(rows[0].get("rule_columns")).items()}
        shown.append(HeldOutPrompt(prompt, gold, tuple(answer for some in answers.values() for answer in some)))
    return HeldOutTable(shown, step, len(by_prompt), tuple(damaged))


def _answer(row: Mapping[str, Any]) -> HeldOutAnswer:
    parts = trace_parts(json_mapping(row.get("rule_trace")))
    # With a line for each rule, the whole set's line is redundant.
    whole = WHOLE_SET.removesuffix("/mean") if parts else None
    names = [name for name in row if name.startswith(_REWARD) and name != whole]
    others = tuple(RulePart(name.removeprefix(_REWARD), finite(row[name])) for name in names)
    completion = conversation_text(row.get("completion"))
    return HeldOutAnswer(str(row.get("decoding", "")), completion, finite(row.get("score")), parts + others)
