"""Messages as other projects write them: turns of `from` and `value`, and JSON text."""

import json
from collections.abc import Mapping
from typing import Any

# ShareGPT's names of roles, LLaMA-Factory's among them.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def messages_of(value: Any) -> Any:
    """Return messages of `role` and `content`; a value that holds none as it is.

    Args:
        value: A list of messages, or one alone, with `role` and `content` or ShareGPT's `from` and `value`; or such a
            list as JSON text (OpenRLHF), of which nothing else is kept: all rows have to be of one form.
    """
    found = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            return value
    found = [found] if isinstance(found, Mapping) else found
    if not (isinstance(found, list) and all(isinstance(turn, Mapping) and _role(turn) for turn in found)):
        return value
    if isinstance(value, list | Mapping) and all(turn.get("role") for turn in found):
        return found
    roles = [_ROLES.get(_role(turn), _role(turn)) for turn in found]
    contents = [turn["content"] if "content" in turn else turn.get("value") for turn in found]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)] or value


def _role(turn: Mapping[str, Any]) -> Any:
    return turn.get("role") or turn.get("from")
