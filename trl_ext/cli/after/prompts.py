"""Prompts of a file, as a run's policy reads them: text or messages, then token ids made as in training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError, DataError

PROMPT_FORMATS = ("chat", "text")


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Return one row per prompt, with the column `prompt`.

    Args:
        path: A .txt file with one prompt a line, of which blank ones are passed over; or a .jsonl file.

    Raises:
        DataError: The file is missing, empty, or no such file.
    """
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
    """Raise DataError unless each row has a prompt that is text or messages, and not empty."""
    for number, row in enumerate(rows):
        if "prompt" not in row:
            there = ", ".join(row) or "none"
            raise DataError(f"Row {number} of {source} has no column 'prompt'; its columns are: {there}. Rename one.")
        prompt = row["prompt"]
        is_messages = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
        if not prompt or not (isinstance(prompt, str) or is_messages):
            shown = json.dumps(prompt)[:80]
            raise DataError(f"The prompt of row {number} of {source} is {shown}. Give text, or a list of messages.")


def as_chat(prompt: Any) -> Any:
    """Return a prompt that is text as a user message, and any other as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_ids(prompts: Sequence[Any], tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> list[list[int]]:
    """Return the token ids of each prompt, as TRL makes them: through the chat template where it is messages.

    Raises:
        ConfigError: Messages, and no chat template.
        DataError: The chat template refuses a prompt, or a prompt has no token.
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
