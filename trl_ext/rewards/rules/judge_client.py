"""One chat completion of an OpenAI-compatible server, through the package openai."""

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trl_ext.errors import RuleError, SupportError

MOST_REPLY_BYTES = 2_000_000


class JudgeReply(NamedTuple):
    """A judge's reply: its text, None where it was cut off or is missing, and the tokens that it took."""

    text: str | None
    tokens: int


def require_openai() -> None:
    """Raise SupportError unless the package openai is there."""
    if find_spec("openai") is None:
        raise SupportError("Judge needs the package openai. Install it: pip install 'trl_ext[judge]'.")


def check_server(name: str, model: Any, base_url: Any, api_key_env: Any) -> None:
    """Raise RuleError, in the name of a rule, unless these can name a model, its server and the server's key."""

    def refuse(sentence: str) -> None:
        raise RuleError(f"Rule '{name}': {sentence}")

    if not isinstance(model, str) or not model:
        refuse(f"model is {model!r}. Give the name that the server has for it.")
    parts = urlsplit(base_url if isinstance(base_url, str) else "")
    if parts.username or parts.password:  # The address is logged: it must hold no secret.
        refuse("base_url holds a user or a password. Give a key by api_key_env.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        refuse(f"base_url is {base_url!r}. Give an address such as http://localhost:8000/v1.")
    # The value is not shown: it may be the key.
    if not isinstance(api_key_env, str) or not re.fullmatch(r"(?:[A-Za-z_][A-Za-z0-9_]*)?", api_key_env):
        refuse("api_key_env is no name of an environment variable. Give its name, not the key.")
    if api_key_env and not os.environ.get(api_key_env):
        refuse(f"the environment variable {api_key_env} is not set. Put the server's key there.")


@lru_cache(maxsize=8)
def client_of(pid: int, base_url: str, key: str, timeout_s: float) -> Any:
    """The client of a server. Its connections belong to a process, so that a forked one gets its own."""
    from openai import AsyncOpenAI

    # AsyncRule tries again, and counts. Without a key a word is sent, lest the client sends that of OPENAI_API_KEY.
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_s, max_retries=0)


async def send(client: Any, request: Mapping[str, Any]) -> JudgeReply:
    """Ask for one chat completion; ValueError for a reply that is none, or that is above 2 MB."""
    body = bytearray()
    async with client.chat.completions.with_streaming_response.create(**request) as response:
        async for part in response.iter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise ValueError(f"the server's reply has more than {MOST_REPLY_BYTES} bytes")
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        text, tokens = choice["message"].get("content"), (found.get("usage") or {}).get("total_tokens")
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the server's reply is no chat completion: {bytes(body[:100])!r}") from error
    known_tokens = tokens if isinstance(tokens, int) and 0 <= tokens < 10**9 else 0
    return JudgeReply(text if isinstance(text, str) and not is_cut else None, known_tokens)
