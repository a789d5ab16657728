"""Read prompts of a file as a run's policy reads them: text or messages, then token ids as in training."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl_ext.cli.after.finished import FinishedRun
from trl_ext.cli.score.rows import read_data, without_nulls
from trl_ext.errors import ConfigError, DataError
from trl_ext.scripts.data.mapping import PROMPT, RowMapping


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Return one row per prompt of a .txt file (a prompt a line) or a data file; DataError if it cannot be read."""
    if not path.endswith(".txt"):
        return read_data(path).to_list()
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}. Check --prompts.") from error
    return [{"prompt": line} for line in lines if line]


def check_prompts(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise DataError unless there are rows, each with a prompt of text or messages that is not empty."""
    if not rows:
        raise DataError(f"{source} holds no prompt. Write at least one.")
    for number, row in enumerate(rows):
        if "prompt" not in row:
            there = ", ".join(row) or "none"
            raise DataError(
                f"Row {number} of {source} has no column 'prompt'; its columns are: {there}. Rename a column."
            )
        prompt = row["prompt"]
        if not prompt or not (isinstance(prompt, str) or _are_messages(prompt)):
            shown = json.dumps(prompt)[:80]
            raise DataError(f"The prompt of row {number} of {source} is {shown}. Give text, or a list of messages.")


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)


def tell_unknown(run: FinishedRun) -> None:
    """Print on stderr that a Python program made the run's prompts, and which of its settings are not repeated."""
    if kwargs := run.recipe.get("generation_kwargs"):
        print(f"note: generation_kwargs of {run.root} are not repeated: {kwargs}.", file=sys.stderr)
    if run.recipe and not any(run.recipe.get(key) for key in ("dataset_name", "datasets")):
        print(
            f"note: {run.root} was trained by a Python program, and its record does not contain how that program made "
            "prompts (system prompt, template). Prompts are used as they are: write them as the program did.",
            file=sys.stderr,
        )


def recipe_mapping(recipe: Mapping[str, Any], prompt_format: str | None = None) -> RowMapping:
    """Return the row mapping of a run's recipe; a given `prompt_format` wins."""
    keys = ("columns", "system_prompt", "prompt_template", "prompt_format", "answer_pattern", "first_option")
    given = {key: recipe.get(key) for key in keys}
    return RowMapping.of(SimpleNamespace(**given | ({"prompt_format": prompt_format} if prompt_format else {})))


def policy_prompts(
    rows: Sequence[Mapping[str, Any]], source: str, mapping: RowMapping, has_template: bool
) -> list[Any]:
    """Return the prompts of these rows as the training would make them.

    Raises ConfigError if the mapping needs a chat template, DataError for a row without a column that it reads.

    Args:
        rows: They have the columns that the recipe reads, or the text for a single column in `prompt`.
        source: File or dataset of the rows, for messages.
        mapping: How the run's recipe makes prompts from rows.
        has_template: Whether the policy's tokenizer has a chat template.
    """
    from datasets import Dataset

    if not rows:
        raise DataError(f"{source} holds no prompt. Write at least one.")
    if mapping.makes_prompts:
        reads = mapping.template.fields if mapping.template else [mapping.columns.get(PROMPT) or PROMPT]
        columns = {ours: theirs for ours, theirs in mapping.columns.items() if theirs in reads}
        mapping = replace(mapping, columns=columns, answer_pattern=None, first_option=None)
        wanted = {*reads, *(name.partition(".")[0] for name in reads)}
        if len(reads) == 1 and not wanted & rows[0].keys():
            rows = [{reads[0]: row.get(PROMPT)} for row in rows]
        if lacking := [name for name in reads if name.partition(".")[0] not in rows[0]]:
            raise DataError(f"{source} has no column '{lacking[0]}', of which the run's recipe makes prompts.")
        rows = [_columns_among(row, wanted) for row in rows]
        rows = mapping.apply(Dataset.from_list(rows), source, lambda: has_template).to_list()
    check_prompts(rows, source)
    return [row["prompt"] for row in rows]


def _columns_among(row: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: cell for name, cell in row.items() if name in names}


def prompt_ids(prompts: Sequence[Any], tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> list[list[int]]:
    """Return the token ids of each prompt, as TRL makes them: messages through the chat template.

    Raises ConfigError for messages without a chat template, DataError for prompts that it refuses or without a token.
    """
    from jinja2 import TemplateError

    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = tokenizer(text=prompt)["input_ids"]
        elif tokenizer.chat_template is None:
            raise ConfigError("The prompts are messages, and the run's tokenizer has no chat template. Give text.")
        else:
            messages = [without_nulls(message) for message in prompt]
            try:
                ids = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=True, **(template_kwargs or {})
                )["input_ids"]
            except (TemplateError, KeyError, TypeError) as error:
                raise DataError(f"The chat template refuses prompt {number}: {error}. Mend that row.") from error
        if not ids:
            raise DataError(f"Prompt {number} has no token: {str(prompt)[:80]!r}. Mend that row.")
        found.append(ids)
    return found
