"""Vectors of texts: of a small model on this machine (model2vec), or of a server with OpenAI's `/v1/embeddings`.

A reply is checked before it is believed: its size, one vector a text, finite numbers. A text that the server does not
take has no vector; that it does not answer at all is EmbeddingFailed.
"""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from math import hypot, isfinite
from operator import mul
from typing import Any

from trl_ext.errors import SupportError

_MOST_TEXTS = 64  # in one request
_MOST_REPLY_BYTES = 64_000_000
_MAX_CHARS = 8_000  # of a text, which is judged by its head: most models read no more than 512 to 8,192 tokens
_REFUSALS = (400, 413, 422)  # HTTP codes that a text may bring about, such as one that is too long for the model

Vector = list[float]


class EmbeddingFailed(Exception):
    """The server gave no vectors; the message says why."""


def require_embeddings(base_url: str) -> None:
    """Raise SupportError unless the package is there that asks a server, or without an address runs a model."""
    package, extra = ("openai", "judge") if base_url else ("model2vec", "embedding")
    if find_spec(package) is None:
        raise SupportError(f"Embeddings need the package {package}. Install it: pip install 'trl_ext[{extra}]'.")


def vectors(
    texts: Sequence[str], model: str, base_url: str = "", api_key_env: str = "", timeout_s: float = 60.0
) -> list[Vector | None]:
    """Return each text's vector, None where the server refuses it; EmbeddingFailed where it does not answer.

    Args:
        texts: Each is read up to 8,000 characters.
        model: The server's name of the model; without a server, a folder or a name on the hub.
        base_url: Address of the server; "" runs the model here.
        api_key_env: Environment variable with the server's key.
        timeout_s: Seconds to wait for an answer, of each of three attempts.
    """
    heads = [text[:_MAX_CHARS].encode("utf-8", "replace").decode() for text in texts]
    if not base_url:
        return [[float(number) for number in vector] for vector in local_model(model).encode(heads)]
    client = client_of(os.getpid(), base_url, os.environ.get(api_key_env, "") if api_key_env else "", timeout_s)
    found: list[Vector | None] = []
    for start in range(0, len(heads), _MOST_TEXTS):
        found += _asked(client, model, heads[start : start + _MOST_TEXTS])
    return found


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors, 0.0 where one of them is zero."""
    lengths = hypot(*one) * hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


@lru_cache(maxsize=4)
def local_model(name: str) -> Any:
    """Load a model of model2vec from a folder or the hub."""
    from model2vec import StaticModel

    return StaticModel.from_pretrained(name)


@lru_cache(maxsize=8)
def client_of(pid: int, base_url: str, key: str, timeout_s: float) -> Any:
    """Return the client of a server; its connections belong to a process, so a forked one gets its own."""
    from openai import OpenAI

    # Without a key a word is sent, lest the client sends that of OPENAI_API_KEY.
    return OpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_s, max_retries=2)


def _asked(client: Any, model: str, texts: list[str]) -> list[Vector | None]:
    """Ask for vectors; where a request is refused, ask for its halves, so that one text fails alone."""
    from openai import APIStatusError, OpenAIError

    body = bytearray()
    try:
        create = client.embeddings.with_streaming_response.create
        with create(model=model, input=texts, encoding_format="float") as response:
            for part in response.iter_bytes():
                body += part
                if len(body) > _MOST_REPLY_BYTES:
                    raise EmbeddingFailed(f"the server's reply has more than {_MOST_REPLY_BYTES} bytes")
    except APIStatusError as error:
        if error.status_code not in _REFUSALS:
            raise EmbeddingFailed(f"the server answered {error.status_code}") from error
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return _asked(client, model, texts[:half]) + _asked(client, model, texts[half:])
    except OpenAIError as error:
        raise EmbeddingFailed(f"{type(error).__name__}: {error}"[:300]) from error
    return list(_read(bytes(body), len(texts)))


def _read(body: bytes, num_texts: int) -> list[Vector]:
    try:
        entries = sorted(json.loads(body)["data"], key=lambda entry: entry["index"])
        found = [[float(number) for number in entry["embedding"]] for entry in entries]
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise EmbeddingFailed(f"the server's reply holds no embeddings: {body[:100]!r}") from error
    widths = {len(vector) for vector in found}
    if len(found) != num_texts or len(widths) != 1 or not all(isfinite(number) for one in found for number in one):
        raise EmbeddingFailed(f"the server's reply holds {len(found)} embeddings of {sorted(widths)} numbers")
    return found
