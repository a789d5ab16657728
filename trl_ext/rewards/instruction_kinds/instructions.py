"""Judge whether the completion follows verifiable instructions of IFEval and IFTrain.

Written from the definitions in arXiv:2311.07911, table 4, and arXiv:2507.02833, appendix. If a definition is
ambiguous, the docstring of the instruction's test gives the reading. docs/reference/instructions.md lists the
packages that were considered.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_column
from trl_ext.rewards.instruction_kinds import ifeval, iftrain
from trl_ext.rewards.instruction_kinds.spec import Instruction
from trl_ext.rewards.rules.json_schema import json_text
from trl_ext.rewards.text.prose import after_think, normalized, refusal

KNOWN = {one.id: one for one in (vars(ifeval) | vars(iftrain)).values() if isinstance(one, Instruction)}

_MAX_INSTRUCTIONS = 64  # in one row
_MAX_LITERAL_CHARS = 100_000

# RLVR-IFeval's functions (allenai/open-instruct, if_functions.py): the id, and the arguments with other names there.
_FUNCTIONS = {
    "verify_keywords": "keywords:existence keyword_list=keywords",
    "verify_keyword_frequency": "keywords:frequency word=keyword N=frequency",
    "validate_forbidden_words": "keywords:forbidden_words",
    "verify_letter_frequency": "keywords:letter_frequency N=let_frequency",
    "validate_response_language": "language:response_language",
    "verify_paragraph_count": "length_constraints:number_paragraphs N=num_paragraphs",
    "validate_word_constraint": "length_constraints:number_words N=num_words quantifier=relation",
    "verify_sentence_constraint": "length_constraints:number_sentences N=num_sentences quantifier=relation",
    "validate_paragraphs": "length_constraints:nth_paragraph_first_word N=num_paragraphs i=nth_paragraph",
    "verify_postscript": "detectable_content:postscript",
    "validate_placeholders": "detectable_content:number_placeholders N=num_placeholders",
    "verify_bullet_points": "detectable_format:number_bullet_lists N=num_bullets",
    "validate_title": "detectable_format:title",
    "validate_choice": "validate_choice",
    "validate_highlighted_sections": "detectable_format:number_highlighted_sections N=num_highlights",
    "validate_sections": "detectable_format:multiple_sections N=num_sections section_splitter=section_spliter",
    "validate_json_format": "detectable_format:json_format",
    "validate_repeat_prompt": "combination:repeat_prompt original_prompt=prompt_to_repeat",
    "validate_two_responses": "combination:two_responses",
    "validate_uppercase": "change_case:english_capital",
    "validate_lowercase": "change_case:english_lowercase",
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency N=capital_frequency quantifier=capital_relation"
    ),
    "validate_end": "startend:end_checker",
    "validate_quotation": "startend:quotation",
    "validate_no_commas": "punctuation:no_comma",
}
# The relation that is not among a function's arguments, because it is always "exactly".
_EXACT = {"keywords:frequency": "relation", "keywords:letter_frequency": "let_relation"}

Task = tuple[Instruction, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Instructions(Rule):
    """1.0 when the completion follows all instructions of its row, else 0.0; without `strict`, the share followed.

    Only the text after the last `</think>` is read, normalised first, so that invisible characters and full-width
    forms do not help. A row has no value (`gold_invalid`) if an instruction is unknown, or an argument is missing,
    unknown or unreadable.

    Args:
        column: Column with the instructions, as a mapping or JSON text: `{"instruction_id_list": [...], "kwargs":
            [...]}` as in IFEval's data set, `[{"instruction_id": [...], "kwargs": [...]}]` as in
            IFTrain's (which is Python's notation, not JSON), `{"func_name": ..., **kwargs}` as in RLVR-IFeval, or a
            list of `{"id": ..., **kwargs}`. Nulls among the arguments are ignored.
        strict: True needs all instructions. False gives the share followed, which also rewards only easy ones.

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
        check_column(self, "column", self.column)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def score(self, row: Row) -> Verdict:
        cell = row.columns[self.column]
        try:
            tasks = read_tasks(json_text(cell))
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
    """Read the instructions in a cell, as JSON text, with their arguments; ValueError gives the error."""
    pairs = list_pairs(parsed(text))
    if not 0 < len(pairs) <= _MAX_INSTRUCTIONS:
        raise ValueError(f"{len(pairs)} instructions; 1 to {_MAX_INSTRUCTIONS} are read")
    for name, arguments in pairs:
        if not isinstance(name, str) or name not in KNOWN:
            raise ValueError(f"unknown instruction {name!r}")
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError(f"{name}: the arguments are {arguments!r}, not a mapping")
    return tuple((KNOWN[name], KNOWN[name].read(arguments or {})) for name, arguments in pairs)


def parsed(text: str) -> Any:
    """Read a cell's text as JSON or as a Python literal; ValueError if it is neither."""
    try:
        return json.loads(text)
    except ValueError as error:
        if len(text) > _MAX_LITERAL_CHARS:
            raise
        try:
            return ast.literal_eval(text.strip())
        except (SyntaxError, ValueError, TypeError, MemoryError):
            raise error from None


def list_pairs(cell: Any) -> list[tuple[Any, Any]]:
    """Return the ids and arguments in a cell of any shape."""
    if isinstance(cell, list) and len(cell) == 1:
        cell = parsed(cell[0]) if isinstance(cell[0], str) else cell[0] if "instruction_id" in cell[0] else cell
    if isinstance(cell, list) and all(isinstance(entry, dict) for entry in cell):
        return [(entry.get("id"), _without(entry, "id")) for entry in cell]
    if isinstance(cell, dict) and "func_name" in cell:
        return _pairs_of_function(cell)
    found = cell if isinstance(cell, dict) else {}
    names, arguments = found.get("instruction_id_list", found.get("instruction_id")), found.get("kwargs")
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise ValueError("neither a list of {id: ...} nor {instruction_id_list: [...], kwargs: [...]} of equal length")
    return list(zip(names, arguments, strict=True))


def _pairs_of_function(cell: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the id and arguments of the instruction that RLVR-IFeval gives as a function's name and arguments."""
    if cell["func_name"] not in _FUNCTIONS:
        raise ValueError(f"unknown function {cell['func_name']!r}")
    name, *pairs = _FUNCTIONS[cell["func_name"]].split()
    renamed = dict(pair.split("=") for pair in pairs)
    given = _without(cell, "func_name")
    arguments = {renamed.get(key, key): value for key, value in given.items() if value is not None}
    return [(name, arguments | ({_EXACT[name]: "exactly"} if name in _EXACT else {}))]


def _without(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
