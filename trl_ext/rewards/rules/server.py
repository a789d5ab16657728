"""Ask a server over HTTP: JSON goes there, and what comes back is trusted as little as a completion.

A reply is read up to 2 MB, no redirect is followed, and a key comes from the environment alone. Attempts, limits and
pauses are `AsyncRule.call`'s.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.rule import check_number

MOST_REPLY_BYTES = 2_000_000
# HTTP codes that a completion may bring about, since it is too long or is filtered. They earn the floor, and count as
# failures all the same, since a wrong configuration brings them about for every row.
REFUSALS = (400, 403, 413, 422, 451)


class ServerError(Exception):
    """A reply with an HTTP code that is none of 2xx; `code` is OpenAI's word for what is wrong, where there is one."""

    def __init__(self, response: Any, body: bytes):
        super().__init__(f"HTTP {response.status_code}: {body[:200].decode('utf-8', 'replace')}")
        self.response, self.status_code = response, response.status_code
        try:
            self.code = json.loads(body)["error"]["code"]
        except (ValueError, LookupError, TypeError, RecursionError):
            self.code = None


class JudgeReply(NamedTuple):
    """A judge's reply: its text, None where it is missing, the tokens that it took, and True where it was cut off."""

    text: str | None
    tokens: int
    is_cut: bool
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model on an OpenAI-compatible server; the fields are those of `Judge`."""

    base_url: str
    model: str
    api_key_env: str = ""
    price: Mapping[str, float] | None = None
    extra_body: Mapping[str, Any] | None = None

    def check(self, rule: Any) -> None:
        """Raise RuleError for what cannot work."""
        owner = f"Rule '{rule.name}'"
        if not isinstance(self.model, str) or not self.model:
            raise RuleError(f"{owner}: model is {self.model!r}. Give the name that the server has for it.")
        check_server(owner, "base_url", self.base_url, self.api_key_env, "http://localhost:8000/v1")
        if self.extra_body is not None and not isinstance(self.extra_body, Mapping):
            raise RuleError(
                f"{owner}: extra_body is {self.extra_body!r}. Give keys of the request, with their values."
            )
        if self.price is not None:
            if not isinstance(self.price, Mapping) or self.price.keys() != {"input", "output"}:
                raise RuleError(f"{owner}: price is {self.price!r}. Give {{input: 0.1, output: 0.4}}, for a million.")
            for usd in self.price.values():
                check_number(rule, "price", usd, "dollars of at least 0", lambda usd: usd >= 0)

    async def chat(self, request: Mapping[str, Any], timeout_s: float) -> JudgeReply:
        """Ask for one chat completion; ValueError for a reply that is none."""
        request = {"model": self.model, **request, **(self.extra_body or {})}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        body = await post(url, json.dumps(request).encode(), self.api_key_env, timeout_s)
        try:
            found = json.loads(body)
            choice = found["choices"][0]
            text, usage = choice["message"].get("content"), found.get("usage") or {}
            counts = [usage.get(f"{name}_tokens") for name in ("total", "prompt", "completion")]
            is_cut = choice.get("finish_reason") == "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the server's reply is no chat completion: {body!r}") from error
        tokens, *apart = (count if isinstance(count, int) and 0 <= count < 10**9 else 0 for count in counts)
        return JudgeReply(text if isinstance(text, str) else None, tokens, is_cut, *apart)


def check_client(rule: str) -> None:
    """Raise SupportError where the HTTP client is missing."""
    if find_spec("openai") is None:
        raise SupportError(f"{rule} asks through openai's HTTP client. Install it: pip install 'trl_ext[judge]'.")


def check_server(owner: str, field: str, url: Any, key_env: Any, example: str) -> None:
    """Raise RuleError for a server's address that cannot be asked, or holds a secret, and for a key that is not there.

    Args:
        owner: Whose fields they are, for the message.
        field, url: The address, by the name of its field.
        key_env: Name of the environment variable with the key; empty for none.
        example: An address that could stand there.
    """
    parts = urlsplit(url if isinstance(url, str) else "")
    # The address is logged, and the variable's value is not shown: it may be the key.
    if parts.username or parts.password:
        raise RuleError(f"{owner}: {field} holds a user or a password. Give a key by api_key_env.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RuleError(f"{owner}: {field} is {url!r}. Give an address such as {example}.")
    if not isinstance(key_env, str) or not re.fullmatch(r"(?:[A-Za-z_][A-Za-z0-9_]*)?", key_env):
        raise RuleError(f"{owner}: api_key_env is no name of an environment variable. Give its name, not the key.")
    if key_env and not os.environ.get(key_env):
        raise RuleError(f"{owner}: the environment variable {key_env} is not set. Put the server's key there.")


async def post(
    url: str, content: bytes, key_env: str, timeout_s: float, content_type: str = "application/json"
) -> bytes:
    """The reply's body; ValueError for one above 2 MB, ServerError for a code that is none of 2xx."""
    headers = {"content-type": content_type}
    if key_env:
        headers["authorization"] = f"Bearer {os.environ.get(key_env, '')}"
    body = bytearray()
    async with _client(os.getpid(), timeout_s).stream("POST", url, content=content, headers=headers) as response:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise ValueError(f"the server's reply has more than {MOST_REPLY_BYTES} bytes")
    if not response.is_success:
        raise ServerError(response, bytes(body))
    return bytes(body)


@lru_cache(maxsize=8)
def _client(pid: int, timeout_s: float) -> Any:
    """The process's connections; a forked one gets its own."""
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient(timeout=timeout_s, follow_redirects=False)
