"""Send requests to a server over HTTP; a reply is trusted as little as a completion.

A reply is read up to 2 MB, no redirect is followed, and keys come only from the environment. `AsyncRule.call` repeats
and limits requests. A reply may quote the key: parse it first, hide the key where it is shown.
"""

import os
import re
import ssl
from functools import lru_cache
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from trl_ext.errors import RuleError, refuse_first

MOST_REPLY_BYTES = 2_000_000
_ERROR_BYTES = 2_000  # of a reply in an error's text: more than is shown, so that a key is hidden before it is cut
# HTTP codes that a completion can cause, because it is too long or is filtered. They earn the floor, and also count as
# failures, because a wrong configuration causes them for every row.
REFUSALS = (400, 403, 413, 422, 451)


class LongReply(ValueError):
    """A reply has more bytes than the limit."""


class ServerError(Exception):
    """A reply has an HTTP code other than 2xx."""

    def __init__(self, response: Any, body: bytes):
        super().__init__(f"HTTP {response.status_code}: {body[:_ERROR_BYTES].decode('utf-8', 'replace')}")
        self.response, self.status_code, self.body = response, response.status_code, body


def check_server(owner: str, field: str, url: Any, key_env: Any, example: str) -> None:
    """Raise RuleError if an address is not valid or contains a secret, or if the key's variable is not set.

    Args:
        owner: The rule or function that asks, for messages.
        field: Its setting with the address, for messages.
        url: The address.
        key_env: Name of the environment variable with the key; "" for none.
        example: A valid address, for messages.
    """
    parts = urlsplit(url if isinstance(url, str) else "")
    # The address is logged. The value of `key_env` is not shown: it may be the key.
    is_name = isinstance(key_env, str) and re.fullmatch(r"(?:[A-Za-z_][A-Za-z0-9_]*)?", key_env) is not None
    refuse_first(
        {
            f"{owner}: {field} holds a user or a password. Give a key by api_key_env.": (
                parts.username or parts.password
            ),
            f"{owner}: {field} is {url!r}. Give an address such as {example}.": (
                parts.scheme not in ("http", "https") or not parts.hostname
            ),
            f"{owner}: api_key_env is no name of an environment variable. Give its name, not the key.": not is_name,
            f"{owner}: the environment variable {key_env} is not set. Put the server's key there.": (
                is_name and key_env and not os.environ.get(key_env)
            ),
        },
        RuleError,
    )


async def fetch(
    url: str,
    content: bytes | None,
    key_env: str,
    timeout_s: float,
    content_type: str = "application/json",
    client: Any = None,
) -> bytes:
    """Send a POST, or a GET if there is no content, and return the body of the reply.

    Raises LongReply for more than MOST_REPLY_BYTES, and ServerError for an HTTP code other than 2xx.

    Args:
        url: The address.
        content: Body of the POST; None makes a GET.
        key_env: Name of the environment variable with the key, sent as a bearer token; "" for none.
        timeout_s: Longest time in seconds to connect, and between two parts of the reply.
        content_type: Type of `content`.
        client: HTTP client; None for the client of the process, which shares connections and cookies.
    """
    headers = {"Content-Type": content_type}
    if key_env:
        key = "".join(os.environ.get(key_env, "").split())  # the error about a line break would show the key
        headers["Authorization"] = f"Bearer {key}"
    body = bytearray()
    client, method = client or _client(os.getpid()), "GET" if content is None else "POST"
    async with client.stream(method, url, content=content, headers=headers, timeout=timeout_s) as response:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise LongReply(f"the server's reply has more than {MOST_REPLY_BYTES} bytes")
    if not response.is_success:
        raise ServerError(response, bytes(body))
    return bytes(body)


def new_client() -> Any:
    """Return a client of huggingface_hub's HTTP library, httpx or httpx2 by its version; it follows no redirect."""
    try:
        httpx = import_module("httpx2")
    except ImportError:
        httpx = import_module("httpx")
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
    return httpx.AsyncClient(follow_redirects=False, limits=limits, verify=_certificates())


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # cached, because it takes some 20 ms


@lru_cache(maxsize=1)
def _client(pid: int) -> Any:
    """Return the process's client; a forked process gets a new client."""
    return new_client()
