"""Judge completions by an HTTP verifier: NeMo-Gym's `/verify`, or any address that takes and returns JSON.

A reply is read up to 2 MB. Without a value in bounds it earns the floor, never None: a completion may have caused it.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from jinja2 import TemplateError

from trl_ext.errors import RuleError
from trl_ext.rewards.base.http_client import check_server, fetch
from trl_ext.rewards.base.rows import content_text
from trl_ext.rewards.base.rule import Row, Verdict, check_choice, check_whole, pair_of
from trl_ext.rewards.rules.async_rule import AsyncRule, CallFailed
from trl_ext.rewards.rules.model_judge import DETAIL_CHARS, compiled

_GIVEN = frozenset({"prompt", "completion", "messages"})


@dataclass(frozen=True, slots=True)
class Remote(AsyncRule):
    """The number that an HTTP verifier returns for a completion, without a change.

    A row has no value if the server fails (`infra_error`). A reply without a number within `bounds` is `no_score`, a
    request that the server refuses is `refused`; both earn the floor.

    Args:
        url: Address of the POST request.
        form: Body of the request. "plain": `prompt`, `completion`, `messages` and the columns of `send`. "nemo_gym":
            the form of NeMo-Gym's `/verify`, with the columns, and prompt and completion as OpenAI's Responses.
        body: A Jinja template that renders to JSON, for any other form: `{"text": {{ completion | tojson }}}`. It
            reads `prompt`, `completion`, `messages`; any other name is a column.
        send: Columns in the request.
        value: Key of the number in the reply, with dots for nested keys: `result.score`.
        bounds: Lowest and highest number that counts.
        api_key_env: Environment variable with a key, sent as a bearer token. Empty: no key.
        max_chars: Longest completion in characters; a longer completion is `too_long` and not sent.

    Example:
        `RuleSet([Remote("http://localhost:8000/verify", form="nemo_gym", send=["expected_answer"])])`
    """

    makes_calls: ClassVar[bool] = True
    judges_correctness: ClassVar[bool] = True
    costs: ClassVar[tuple[str, ...]] = ()

    url: str
    form: str = "plain"
    body: str = ""
    send: tuple[str, ...] = ()
    value: str = "reward"
    bounds: tuple[float, float] = (0.0, 1.0)
    api_key_env: str = ""
    max_chars: int = 50_000

    def check(self) -> None:
        check_server(f"Rule '{self.name}'", "url", self.url, self.api_key_env, "http://localhost:8000/verify")
        check_choice(self, "form", self.form, ("plain", "nemo_gym"))
        check_whole(self, "max_chars", self.max_chars, 1)
        if isinstance(self.send, str) or not all(isinstance(name, str) and name for name in self.send):
            self._refuse(f"send is {self.send!r}. Give a list of columns.")
        object.__setattr__(self, "send", tuple(self.send))
        object.__setattr__(self, "bounds", pair_of(f"Rule '{self.name}'", "bounds", self.bounds))
        if not isinstance(self.value, str) or not self.value:
            self._refuse(f"value is {self.value!r}. Give the key of the number in the reply, such as reward.")
        if self.body and (self.form != "plain" or self.send):
            self._refuse("there is a body next to form or send, which it replaces. Leave these out.")
        try:
            names = compiled(self.body)[1]
        except TemplateError as error:
            raise RuleError(f"Rule '{self.name}': the body is not valid Jinja: {error}.") from error
        if self.body and not {"completion", "messages"} & names:
            self._refuse("the body does not show {{ completion | tojson }} or {{ messages | tojson }}. Add it.")

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.send, *sorted(compiled(self.body)[1] - _GIVEN))

    def server_key(self) -> Hashable:
        return self.url

    async def score(self, row: Row) -> Verdict:  # type: ignore[override]
        if len(row.text) > self.max_chars:
            return Verdict(self.floor, "too_long", f"{len(row.text)} characters")
        columns = {name: row.columns.get(name) for name in self.columns}
        given = {"prompt": row.prompt, "completion": row.text, "messages": [dict(one) for one in row.messages]}
        if self.body:  # A request cannot hold a lone surrogate.
            content = compiled(self.body)[0].render(given | columns).encode("utf-8", "replace")
        else:
            found = given if self.form == "plain" else as_responses(row.prompt, row.messages)
            content = json.dumps({**found, **columns}, default=str).encode()
        try:
            reply = await self.call(lambda: fetch(self.url, content, self.api_key_env, self.timeout_s))
        except CallFailed as failed:
            return self.verdict_of(failed)
        return self._verdict(reply)

    def _verdict(self, reply: bytes) -> Verdict:
        shown = self.without_secrets(reply.decode("utf-8", "replace"))[:DETAIL_CHARS]
        try:
            found: Any = json.loads(reply)
        except (ValueError, RecursionError):
            return Verdict(self.floor, "no_score", f"the reply is no JSON: {shown!r}")
        for key in self.value.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        low, high = self.bounds
        if not isinstance(found, bool | int | float) or not low <= found <= high:
            return Verdict(
                self.floor, "no_score", f"no number from {low:g} to {high:g} at '{self.value}' in {shown!r}"
            )
        return Verdict(float(found), "ok", shown)


def functions_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return name and arguments of the functions that a message calls, without calls that have another form."""
    calls = message.get("tool_calls")
    calls = [one for one in calls if isinstance(one, Mapping)] if isinstance(calls, list | tuple) else []
    found = [one.get("function") for one in calls if one.get("type") in (None, "function")]
    return [one for one in found if isinstance(one, Mapping) and isinstance(one.get("name"), str)]


def as_responses(prompt: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return prompt and completion, with its tool calls, in the form of OpenAI's Responses, for NeMo-Gym."""
    prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt or "")}]
    output: list[dict[str, Any]] = []
    calls, results = count(), count()
    said = {"id": "message", "type": "message", "role": "assistant", "status": "completed"}
    for message in messages:
        text, made = content_text(message.get("content")), functions_of(message)
        if message.get("role") == "tool":
            output.append({"type": "function_call_output", "call_id": f"call_{next(results)}", "output": text})
        elif text or not made:
            output.append({**said, "content": [{"type": "output_text", "text": text, "annotations": []}]})
        for function in made:
            arguments = {"name": function["name"], "arguments": json.dumps(function.get("arguments"))}
            output.append({"type": "function_call", "call_id": f"call_{next(calls)}", **arguments})
    asked = {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    response = {"id": "response", "created_at": 0.0, "model": "policy", "object": "response", "output": output}
    return {"responses_create_params": {"input": prompt}, "response": response | asked}
