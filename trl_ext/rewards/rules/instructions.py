"""Judge whether the completion follows verifiable instructions: those of IFEval, IFBench and IFTrain.

Written from the definitions in arXiv:2311.07911, table 4, and arXiv:2507.02833, appendix. Where they can be read in
two ways, the docstring of the instruction's test says which reading is taken. The packages that
were weighed stand in docs/reference/instructions.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.rewards.instruction_kinds import (
    content,
    copying,
    counting,
    fixed_tasks,
    format,
    language,
    layout,
    length,
    sentence_order,
    word_order,
    wording,
)
from trl_ext.rewards.instruction_kinds.spec import Instruction
from trl_ext.rewards.rule import Row, Rule, Verdict, check_column, check_flag
from trl_ext.rewards.text.prose import normalized, refusal
from trl_ext.rewards.text.visible import after_think

_MODULES = (
    *(wording, length, content, format, language),  # IFEval's, and IFTrain's of the same families
    *(counting, word_order, sentence_order, layout, copying, fixed_tasks),  # IFBench's, and IFTrain's others
)
KNOWN: Mapping[str, Instruction] = {one.id: one for module in _MODULES for one in module.INSTRUCTIONS}

_MAX_INSTRUCTIONS = 64  # in one row

Task = tuple[Instruction, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Instructions(Rule):
    """1.0 when the completion follows all instructions of its row, else 0.0; without `strict`, the share followed.

    Only the text behind the last `</think>` is read, normalised first, so that neither invisible characters nor
    full-width forms help. A row has no value (`gold_invalid`) when it names an unknown instruction, or an argument is
    missing, unknown or of no use.

    Args:
        column: Column with the instructions, as a mapping or JSON text: `{"instruction_id_list": [...], "kwargs":
            [...]}` as in the IFEval data set, or a list of `{"id": ..., **kwargs}`. Nulls among the arguments are
            ignored.
        strict: True asks for all instructions. False gives the share, which pays for the easy ones alone.

    Example:
        >>> rule = Instructions(strict=False)
        >>> asked = [{"id": "punctuation:no_comma"}, {"id": "detectable_format:title"}]
        >>> rule.score(Row(None, "Yes. No.", None, {"instructions": asked})).value
        0.5
    """

    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True

    column: str = "instructions"
    strict: bool = True

    def check(self) -> None:
        check_flag(self, "strict", self.strict)
        check_column(self, "column", self.column)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def score(self, row: Row) -> Verdict:
        cell = row.columns[self.column]
        try:
            tasks = read_tasks(cell if isinstance(cell, str) else json.dumps(cell))
        except (TypeError, ValueError, RecursionError) as error:
            return Verdict(None, "gold_invalid", f"column '{self.column}': {error}"[:300])
        response = after_think(row.text)
        refused = refusal(self, response)
        if refused is not None:
            return refused
        response = normalized(response)
        failed = [task.id for task, arguments in tasks if not task.follows(response, **arguments)]
        share = 1.0 - len(failed) / len(tasks)
        value = share if not self.strict else float(not failed)
        return Verdict(value, "ok", f"failed: {', '.join(failed)}" if failed else "all followed")


@lru_cache(maxsize=4096)  # The completions of a GRPO group share their instructions.
def read_tasks(text: str) -> tuple[Task, ...]:
    """Read the instructions in a cell, as JSON text, with their arguments; ValueError says what is wrong with it."""
    pairs = list_pairs(json.loads(text))
    if not 0 < len(pairs) <= _MAX_INSTRUCTIONS:
        raise ValueError(f"{len(pairs)} instructions; 1 to {_MAX_INSTRUCTIONS} are read")
    return tuple((KNOWN[name], KNOWN[name].read(arguments)) for name, arguments in map(checked_pair, pairs))


def list_pairs(cell: Any) -> list[tuple[Any, Any]]:
    """Return the ids and arguments in a cell of either shape."""
    if isinstance(cell, list) and all(isinstance(entry, dict) for entry in cell):
        return [(entry.get("id"), {name: entry[name] for name in entry if name != "id"}) for entry in cell]
    names, arguments = (
        (cell.get("instruction_id_list"), cell.get("kwargs")) if isinstance(cell, dict) else (None, None)
    )
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise ValueError("neither a list of {id: ...} nor {instruction_id_list: [...], kwargs: [...]} of equal length")
    return list(zip(names, arguments, strict=True))


def checked_pair(pair: tuple[Any, Any]) -> tuple[str, dict[str, Any]]:
    """Return the pair; ValueError unless the id is known and the arguments are a mapping, or null for none."""
    name, arguments = pair
    if not isinstance(name, str) or name not in KNOWN:
        raise ValueError(f"unknown instruction {name!r}")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{name}: the arguments are {arguments!r}, not a mapping")
    return name, arguments or {}
