"""Checks of texts and lists of messages, for the rows of all trainers."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keys that a message may have instead of content.
INSTEAD_OF_CONTENT = ("tool_calls", "thinking", "reasoning_content")
# Invisible letters and marks. Control and format characters (BOM, zero-width, soft hyphen, bidi) have a category.
_INVISIBLE = "".join(map(chr, (0x034F, 0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10))))
_STANDS_FOR_MEDIA = re.compile("image|vision|video|audio|img")
# Roles that any chat may have; a template may name more.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class TextCheck:
    """Finds texts and messages that a model cannot be trained on."""

    may_be_blank: bool = False  # True if something else fills a prompt: an image, an environment
    is_answer: bool = False  # True if the last message must have content
    roles: tuple[str, ...] = ()  # roles that a message may have; empty for any

    @classmethod
    def of(cls, processor: Any, **options: bool) -> "TextCheck":
        """Return the check for a tokenizer or processor; None has no chat template."""
        template = getattr(processor, "chat_template", None)
        named = re.findall(r"""['"](\w+)['"]""", str(template)) if template else ()
        return cls(roles=(*_ROLES, *named) if named else (), **options)

    def problem(self, value: Any, what: str) -> str:
        """Return the problem of a text or list of messages called `what`, in words that follow "row 7 has", or ""."""
        if value is None:
            return f"no {what} (null)"
        if isinstance(value, str):
            if found := _unreadable(value):
                return f"{found} in its {what}"
            is_bad = not self.may_be_blank and is_blank(value)
            return f"{'a blank' if value else 'an empty'} {what}" if is_bad else ""
        if not isinstance(value, list):
            return f"a {what} of type {type(value).__name__}, which is neither text nor a list of messages"
        if not value:
            return f"a {what} without messages"
        return self._problem_of_messages(value, what)

    def _problem_of_messages(self, messages: list[Any], what: str) -> str:
        for message in messages:
            if found := self._problem_of_message(message, what):
                return found
        if self.is_answer and not _says_something(messages[-1]):
            return f"a {what} whose last message is empty"
        is_bad = not self.may_be_blank and not any(map(_says_something, messages))
        return f"a {what} whose messages are empty" if is_bad else ""

    def _problem_of_message(self, message: Any, what: str) -> str:
        """Return the problem of one message, as `problem` does; an empty content is none."""
        if not isinstance(message, Mapping):
            return f"a {what} that is a list of {type(message).__name__}, not of messages"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role.strip():
            way_out = " (a recipe reads `from` and `value` by its columns)" if "from" in message else ""
            return f"a message without role in its {what}{way_out}"
        if self.roles and role not in self.roles:
            return f"a message in its {what} with the role '{role}', which the chat template does not name"
        if content is None and not _says_something(message):
            return f"a message without content in its {what}"
        if not isinstance(content, str | list | None):
            return f"a message in its {what} whose content is of type {type(content).__name__}"
        if isinstance(content, str) and (found := _unreadable(content)):
            return f"{found} in its {what}"
        return ""


def _says_something(message: Mapping[str, Any]) -> bool:
    """Return True for a message with visible content, or with something instead of content."""
    if any(message.get(name) for name in INSTEAD_OF_CONTENT):
        return True
    content = message.get("content")
    return not is_blank(content) if isinstance(content, str) else bool(content)


def special_token_in(text: str, tokenizer: Any) -> str:
    """Return a special token of the tokenizer that the text holds, as text rendered by a chat template does, or "".

    Tokens that stand for an image, a video or a sound do not count.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = [*getattr(tokenizer, "all_special_tokens", ()), *(str(one) for one in added if one.special)]
    return next((one for one in special if one in text and not _STANDS_FOR_MEDIA.search(one)), "")


def warn_of_two_begins(text: Any, role: str, tokenizer: Any) -> None:
    """Warn if a dataset's first text begins with BOS, and the tokenizer writes BOS before any text."""
    bos = getattr(tokenizer, "bos_token", None)
    if not bos or not isinstance(text, str) or not text.startswith(bos):
        return
    if tokenizer(text=text)["input_ids"][:2] == [tokenizer.bos_token_id] * 2:
        logger.warning(
            f"{role}: row 0 begins with {bos}, and the tokenizer adds another: the model reads {bos} twice. Cut it "
            f"off the texts, or give messages."
        )


def is_blank(text: str) -> bool:
    """Return True for a text without visible characters."""
    return all(c.isspace() or c in _INVISIBLE or unicodedata.category(c) in ("Cc", "Cf") for c in text)


def _unreadable(text: str) -> str:
    """Return the character that a tokenizer or a rule may fail on, in words; empty if there is none."""
    if "\0" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a character that is no Unicode (half a surrogate pair, or bytes that are no UTF-8)"
    return ""
