"""Ask a server over HTTP: what comes back is trusted as little as a completion.

A reply is read up to 2 MB, no redirect is followed, and a key comes from the environment alone. Attempts, limits and
pauses are `AsyncRule.call`'s.
"""

import json
import os
import re
import ssl
from functools import lru_cache
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from trl_ext.errors import RuleError

MOST_REPLY_BYTES = 2_000_000
# HTTP codes that a completion may bring about, since it is too long or is filtered. They earn the floor, and count as
# failures all the same, since a wrong configuration brings them about for every row.
REFUSALS = (400, 403, 413, 422, 451)


class LongReply(ValueError):
    """A reply has more bytes than are read."""


class ServerError(Exception):
    """A reply with an HTTP code that is none of 2xx; `code` is OpenAI's word for what is wrong, where there is one."""

    def __init__(self, response: Any, body: bytes):
        super().__init__(f"HTTP {response.status_code}: {body[:200].decode('utf-8', 'replace')}")
        self.response, self.status_code, self.body = response, response.status_code, body
        try:
            self.code = json.loads(body)["error"]["code"]
        except (ValueError, LookupError, TypeError, RecursionError):
            self.code = None


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


async def fetch(
    url: str,
    content: bytes | None,
    key_env: str,
    timeout_s: float,
    content_type: str = "application/json",
    client: Any = None,
    most_bytes: int = MOST_REPLY_BYTES,
) -> bytes:
    """The body of the reply to a POST, or to a GET without content.

    A key comes from the environment variable `key_env`; `client` has connections and cookies of one's own, else the
    process's are used.

    Raises:
        LongReply: The reply has more than `most_bytes`.
        ServerError: Its code is none of 2xx.
    """
    headers = {"Content-Type": content_type}
    if key_env:
        key = "".join(os.environ.get(key_env, "").split())  # of a line break an error would show the key
        headers["Authorization"] = f"Bearer {key}"
    body = bytearray()
    client, method = client or _client(os.getpid()), "GET" if content is None else "POST"
    async with client.stream(method, url, content=content, headers=headers, timeout=timeout_s) as response:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > most_bytes:
                raise LongReply(f"the server's reply has more than {most_bytes} bytes")
    if key_env and key:  # which a server may quote
        body = body.replace(key.encode(), b"***")
    if not response.is_success:
        raise ServerError(response, bytes(body))
    return bytes(body)


def new_client() -> Any:
    """Connections of huggingface_hub's HTTP library, whose name depends on its version; they follow no redirect."""
    try:
        httpx = import_module("httpx2")
    except ImportError:
        httpx = import_module("httpx")
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
    return httpx.AsyncClient(follow_redirects=False, limits=limits, verify=_certificates())


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # once, as it takes some 20 ms


@lru_cache(maxsize=1)
def _client(pid: int) -> Any:
    """The process's connections; a forked one gets its own."""
    return new_client()
