"""Prompts of rows: text around a row's columns, and messages in the formats of other projects.

`"{question}\\nLet's think step by step."` has fields, which are column names only. `str.format` would also read
attributes and items of values, so it is not used.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from string import Formatter, ascii_uppercase
from typing import Any

from trl_ext.errors import ConfigError

# Role names of ShareGPT and LLaMA-Factory.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Text with places for columns.

    Args:
        parts: Each text with the column after it; the last column is None.
    """

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> "PromptTemplate":
        """Read a template in Python's format: a column's name in braces; doubled braces are literal braces.

        Raises:
            ConfigError: The braces do not match, a field is more than a name, or there is no field.
        """
        try:
            found = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"prompt_template: {error}. Double the braces that stay: {{{{ and }}}}.") from error
        for _, field, spec, conversion in found:
            if field == "" or spec or conversion:
                raise ConfigError(
                    f"prompt_template has braces with more or less than a column's name: '{field}'. Write a name, or "
                    r"double braces that stay, as in \boxed{{}}."
                )
        template = cls(tuple((before, field) for before, field, _, _ in found))
        if not template.fields:
            raise ConfigError(
                "prompt_template names no column, so all prompts would be the same. Write a column's name in braces, "
                "such as {question}."
            )
        return template

    @property
    def fields(self) -> list[str]:
        """The columns that the template reads, without repetition."""
        return list(dict.fromkeys(field for _, field in self.parts if field is not None))

    def filled(self, row: Mapping[str, Any], names: Mapping[str, str]) -> str:
        """Return the text for a row; `names` maps fields to their current column names where these differ."""
        return "".join(
            text if field is None else f"{text}{written(row[names.get(field, field)])}" for text, field in self.parts
        )


def written(value: Any) -> str | None:
    """Return a value as text for a template; None if it cannot be written.

    A list of numbers is `[44, 19, 35]`; a list of texts becomes options, one a line with a letter: `A. Paris`.
    """
    if not isinstance(value, list):
        return str(value) if isinstance(value, str | int | float) else None
    if value and all(isinstance(item, str) for item in value) and len(value) <= len(ascii_uppercase):
        return "\n".join(f"{letter}. {item}" for letter, item in zip(ascii_uppercase, value, strict=False))
    return str(value) if value and all(isinstance(item, int | float) for item in value) else None


def messages_of(value: Any) -> Any:
    """Return messages with `role` and `content`; any other value unchanged.

    Args:
        value: A message or a list of messages, with `role` and `content` or ShareGPT's `from` and `value`; or such a
            list as JSON text (OpenRLHF). Other keys of converted messages are dropped, so that all rows have one form.
    """
    found = _from_json(value)
    turns = [found] if isinstance(found, Mapping) else found
    if not isinstance(turns, list) or not all(_is_message(turn) for turn in turns):
        return value
    if not isinstance(value, str) and all(turn.get("role") for turn in turns):
        return turns
    return [_convert(turn) for turn in turns] or value


def _from_json(value: Any) -> Any:
    """Return the list that a text holds as JSON; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and bool(_role(turn))


def _convert(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the keys `role` and `content` only, the role as the trainers name it."""
    role = _role(turn)
    return {"role": _ROLES.get(role, role), "content": turn.get("content", turn.get("value"))}


def _role(turn: Mapping[str, Any]) -> Any:
    return turn.get("role") or turn.get("from")
