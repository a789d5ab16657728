"""A language model on an OpenAI-compatible server, and its reply."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trl_ext.errors import RuleError
from trl_ext.rewards.base.http_client import check_server, fetch
from trl_ext.rewards.base.rule import check_number


class JudgeReply(NamedTuple):
    """A judge's reply: its text or None, its tokens, and True if it was cut off."""

    text: str | None
    tokens: int
    is_cut: bool
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model on an OpenAI-compatible server; the fields are `Judge`'s."""

    base_url: str
    model: str
    api_key_env: str = ""
    price: Mapping[str, float] | None = None
    extra_body: Mapping[str, Any] | None = None

    def check(self, rule: Any) -> None:
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
        """Request a chat completion; ValueError for any other reply."""
        request = {"model": self.model, **request, **(self.extra_body or {})}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        body = await fetch(url, json.dumps(request).encode(), self.api_key_env, timeout_s)
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
