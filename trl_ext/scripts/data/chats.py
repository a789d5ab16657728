"""Messages in the formats of other projects: turns of `from` and `value`, and JSON text."""

import json
from collections.abc import Mapping
from typing import Any

# Role names of ShareGPT and LLaMA-Factory.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def messages_of(value: Any) -> Any:
    """Return messages with `role` and `content`; any other value unchanged.

    Args:
        value: A message or a list of messages, with `role` and `content` or ShareGPT's `from` and `value`; or such a
            list as JSON text (OpenRLHF). Other keys of converted messages are dropped, so that all rows have one form.
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
