"""Read prompts of a file as a run's policy reads them: text or messages, then token ids as in training."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl_ext.cli.after.finished import FinishedRun
from trl_ext.errors import ConfigError, DataError
from trl_ext.scripts.data.mapping import PROMPT, RowMapping, within


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Return one row per prompt of a .txt file (a prompt a line) or .jsonl file; DataError if it cannot be read."""
    from trl_ext.scripts.data.dataset import bad_line

    file = Path(path)
    if not file.is_file():
        raise DataError(f"There is no file {path}. Check --prompts.")
    if file.suffix not in (".txt", ".jsonl"):
        raise DataError(f"{path} is neither .txt, one prompt a line, nor .jsonl, one row a line. Convert it.")
    if file.suffix == ".jsonl" and (reason := bad_line(file)):
        raise DataError(f"{path}, {reason}. Mend it.")
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}. Convert it.") from error
    if not lines:
        raise DataError(f"{path} holds no prompt. Write one a line.")
    return [{"prompt": line.strip()} if file.suffix == ".txt" else json.loads(line) for line in lines]


def check_prompts(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise DataError unless each row has a prompt of text or messages that is not empty."""
    for number, row in enumerate(rows):
        if "prompt" not in row:
            there = ", ".join(row) or "none"
            raise DataError(
                f"Row {number} of {source} has no column 'prompt'; its columns are: {there}. Rename a column."
            )
        prompt = row["prompt"]
        is_messages = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
        if not prompt or not (isinstance(prompt, str) or is_messages):
            shown = json.dumps(prompt)[:80]
            raise DataError(f"The prompt of row {number} of {source} is {shown}. Give text, or a list of messages.")


def tell_unknown(run: FinishedRun) -> None:
    """Print on stderr that a Python program made the run's prompts, if the recipe does not show how."""
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

    A row may bring the columns that the recipe reads, or the text for a single column in `prompt`. Raises ConfigError
    if the mapping needs a chat template, DataError for a row without a column that it reads.
    """
    if not mapping.makes_prompts:
        check_prompts(rows, source)
        return [row["prompt"] for row in rows]
    makes_chats = mapping.makes_chats(lambda: has_template)
    reads = mapping.template.fields if mapping.template else [mapping.columns.get(PROMPT) or PROMPT]
    columns = {name: theirs for name, theirs in mapping.columns.items() if theirs in reads}
    mapping = replace(mapping, columns=columns, answer_pattern=None, first_option=None)
    ours = {theirs: name for name, theirs in columns.items()}
    found = []
    for number, row in enumerate(rows):
        text = row.get(PROMPT)
        given = {name: row.get(name, within(row, name)) for name in reads}
        cells = {name: cell for name, cell in given.items() if name in row or cell is not None}
        if len(reads) == 1 and not cells and text:
            cells = {reads[0]: text}
        if lacking := [name for name in reads if name not in cells]:
            raise DataError(
                f"Row {number} of {source} has no column '{lacking[0]}', from which the run's recipe makes prompts; "
                f"its columns are: {', '.join(row) or 'none'}. Add it."
            )
        own = {ours.get(name, name): cell for name, cell in cells.items()}
        if problem := mapping.problem(own):
            raise DataError(f"Row {number} of {source} has {problem}. Mend it.")
        found.append(mapping.rewritten(own, makes_chats)[PROMPT])
    return found


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
            messages = [{key: part for key, part in message.items() if part is not None} for message in prompt]
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
