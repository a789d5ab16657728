"""Clients of environment servers for `environment_factory`, and the reward of their episodes.

TRL makes an object per rollout, calls `reset` with its row, and offers its public methods to the model as tools. If a
server fails, takes too long or sends no JSON, only that row is lost: it gets the floor even if it had earned more,
because a completion may cause the failure. After three timeouts of a call in a row, it is tried once in each
`timeout_s`, and other rows are lost at once. A session ends with its score; checkpoints hold no sessions.
"""

import asyncio
import inspect
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from trl_ext.errors import RuleError
from trl_ext.rewards.base.http_client import MOST_REPLY_BYTES, REFUSALS, ServerError, check_server, fetch, new_client
from trl_ext.rewards.isolation.workers.breaker import LATE_CALLS, MISTAKE_CALLS, share_above
from trl_ext.rewards.rules.async_rule import run_in_loop
from trl_ext.rewards.rules.remote import as_responses, functions_of
from trl_ext.rewards.text.secrets import hide, public, secrets_in
from trl_ext.rewards.totals.scorer import LARGEST

logger = logging.getLogger("trl_ext.rewards")
MOST_LOST = 0.05  # of the rows of 20 steps
_ADDRESSES = ("seed_session", "verify", "aggregate_metrics", "run", "mcp")  # NeMo-Gym's addresses that are no tools
_GONE = "error: the environment is gone"
_TAKEN = ("reset", "get_reward", "earned", "lost", "tools")  # by TRL and by `Environment`
_TYPES: dict[Any, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict}
_Part = inspect.Parameter


class Environment:
    """One rollout's session with a server; the classes from `nemo_gym` and `openenv` have its tools as methods.

    Attributes:
        earned: Reward of each tool call of this episode, in order.
        lost: Why the episode cannot continue; empty while it can.
        timeout_s: Longest time in seconds to wait for a reply.
    """

    tools: ClassVar[dict[str, Any]] = {}
    timeout_s: ClassVar[float] = math.inf
    # By call: the number of timeouts in a row, and the end of the last.
    _late: ClassVar[dict[str, tuple[int, float]]] = {}
    _secrets: ClassVar[frozenset[str]] = frozenset()  # to be hidden in texts of the server
    _begin: Callable[..., str | None]
    _step: Callable[..., str]
    _session: Any = None
    lost = ""

    def __init_subclass__(cls, timeout_s: float | None = None) -> None:
        cls.timeout_s, cls._late = timeout_s or cls.timeout_s, {}

    def reset(self, **row: Any) -> str | None:
        """Begin an episode with a row of the dataset; return the text to append to its prompt."""
        self._close()
        self.earned: list[float] = []
        self.lost = ""
        return self._guard("reset", self._begin, row)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        self.earned.append(0.0)
        return self._guard(name, self._step, name, arguments)

    def _end(self, prompt: Any, completion: Any) -> float:
        """Return the reward of the episode in addition to its calls."""
        return 0.0

    def _guard(self, name: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        (num_late, ended), began = self._late.get(name, (0, 0.0)), time.monotonic()
        late = f"`{name}` of an environment did not reply within {self.timeout_s:g} s"
        if num_late >= LATE_CALLS and began < ended + self.timeout_s:
            self.lost = self.lost or f"{late}, {num_late} calls in a row"
        if self.lost:
            return _GONE
        try:
            found = ask(*arguments)
            # No tokenizer takes a lone surrogate.
            found = found.encode("utf-8", "replace").decode() if isinstance(found, str) else found
        except Exception as error:  # A client's exception costs this row, and is counted.
            self.lost, found = hide(f"{type(error).__name__}: {error}", self._secrets)[:300], _GONE
        if self.lost and time.monotonic() - began >= 0.9 * self.timeout_s:
            if name not in self._late:
                logger.warning(f"{late}: its row is lost. After {LATE_CALLS} in a row, others too at once.")
            self.lost, self._late[name] = late, (num_late + 1, time.monotonic())
        elif name in self._late:
            self._late[name] = (0, 0.0)
        return found

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # The connection is lost.
                run_in_loop(session.aclose()) if hasattr(session, "aclose") else session.close()


class EnvironmentReward:
    """Reward of each turn in an environment of `nemo_gym` or `openenv`: `reward_funcs=EnvironmentReward()`.

    PPO takes each turn's reward at the turn's last token, GRPO their sum. A row with a lost environment earns the
    floor; the first gives a warning with its reason, and more than 5 % of the rows of 20 calls end the run.
    """

    __name__ = "environment"
    sums_turns = True

    def __init__(self, floor: float = 0.0):
        self.floor = floor
        self._calls: deque[tuple[int, int]] = deque(maxlen=MISTAKE_CALLS)
        self._has_warned = False

    def __call__(self, prompts: Any, completions: Any, environments: Any, **columns: Any) -> list[Any]:
        """Return for each completion a float per turn, or the floor; None for other environments."""
        rows = zip(prompts, completions, environments, strict=True)
        rewards = [self._of(*row) if isinstance(row[-1], Environment) else None for row in rows]
        lost = [one.lost for one in environments if isinstance(one, Environment) and one.lost]
        columns["log_metric"]("rules/environment/lost_frac", len(lost) / len(rewards))
        if lost and not self._has_warned:
            self._has_warned = True
            logger.warning("An environment was lost, and its row earns %g: %s", self.floor, lost[0])
        if above := share_above(self._calls, len(rewards), len(lost), MOST_LOST):
            (last,) = lost[-1:] or ["in an earlier step"]
            raise RuleError(
                f"{above.failed} of the last {above.total} rows lost their environment, more than {MOST_LOST:.0%} of "
                f"the rows of {MISTAKE_CALLS} steps. Repair the server. The last: {last}"
            )
        return rewards

    def _of(self, prompt: Any, completion: Any, environment: Environment) -> list[float] | float:
        last = environment._guard("verify", environment._end, prompt, completion)
        environment._close()
        if environment.lost:
            return self.floor
        turns = [one for one in completion if isinstance(one, Mapping) and one.get("role") == "assistant"]
        if not turns:
            return sum(environment.earned) + last
        earned, rewards = iter(environment.earned), []
        for message in turns:
            calls = [call for call in functions_of(message) if call["name"] in list(environment.tools)]
            # Only calls that TRL has run. It runs none in the last turn that it allows.
            rewards.append(sum(next(earned, 0.0) for call in calls if isinstance(call.get("arguments"), Mapping)))
        rewards[-1] += last
        return rewards


def nemo_gym(
    url: str, tools: Sequence[Any] = (), *, turn_reward: str = "", api_key_env: str = "", timeout_s: float = 60.0
) -> type[Environment]:
    """Return the environment of a NeMo-Gym resources server: `/seed_session`, an address per tool, `/verify`.

    Args:
        url: The server's address.
        tools: Names of the tools to offer, or their schemas, as in `responses_create_params`. Empty: all tools.
        turn_reward: Key in a tool's reply with the turn's reward. The last turn gets the reward of `/verify`, too.
        api_key_env: Environment variable with a key, sent as a bearer token. Empty: no key.
        timeout_s: Longest time in seconds to wait for a reply.

    Raises:
        RuleError: if an address or key cannot be used, or the server does not list the tools.
    """
    check_server("nemo_gym", "url", url, api_key_env, "http://localhost:8000")

    def ask(session: Any, path: str, body: Any = None, refusals: Sequence[int] = ()) -> Any:
        """Return the server's reply, parsed from JSON.

        Args:
            session: The episode's HTTP client, which keeps its cookies.
            path: Address below the server's.
            body: Sent as JSON; None makes a GET.
            refusals: HTTP codes of a reply that is read like an answer.
        """
        content = None if body is None else json.dumps(body, default=str).encode()
        asked = fetch(f"{url.rstrip('/')}/{path}", content, api_key_env, timeout_s, client=session)
        try:
            return json.loads(run_in_loop(asyncio.wait_for(asked, timeout_s)).result())
        except ServerError as error:
            if error.status_code not in refusals:
                raise
            return json.loads(error.body)

    hidden = frozenset(secrets_in({"url": url, "api_key_env": api_key_env}))

    class NemoGym(Environment, timeout_s=timeout_s):
        _secrets = hidden

        def _begin(self, row: dict[str, Any]) -> None:
            self._session, self._row = new_client(), {name: cell for name, cell in row.items() if name != "prompt"}
            ask(self._session, "seed_session", as_responses(row.get("prompt"), ()) | self._row)

        def _step(self, name: str, arguments: dict[str, Any]) -> str:
            reply = ask(self._session, name, arguments, REFUSALS)  # The model's arguments may cause a refusal.
            if turn_reward and isinstance(reply, dict) and turn_reward in reply:
                self.earned[-1] = _number(reply[turn_reward])
            return hide(reply if isinstance(reply, str) else json.dumps(reply, ensure_ascii=False), hidden)

        def _end(self, prompt: Any, completion: Any) -> float:
            return _number(ask(self._session, "verify", as_responses(prompt, completion) | self._row)["reward"])

    if tools and not isinstance(tools[0], str):
        return with_tools(NemoGym, {tool["name"]: (tool, tool.get("parameters") or {}) for tool in tools})
    try:
        page = ask(None, "openapi.json")
        listed = _list_tools(page, tools)
    except Exception as error:  # The connection or the page may be at fault.
        said = f"{public(url)} does not list such tools: {hide(repr(error), hidden)[:200]}"
        raise RuleError(f"{said}. Start it, or give the tools' schemas.") from error
    return with_tools(NemoGym, listed, page)


def _list_tools(page: Any, names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return a server's tools of these names, or all, from its OpenAPI page: descriptions and arguments' schemas."""
    listed = {path[1:]: item["post"] for path, item in page["paths"].items() if "post" in item}
    names = names or [name for name in listed if name.isidentifier() and name not in _ADDRESSES]
    bodies = {name: listed[name].get("requestBody", {}).get("content", {}) for name in names}
    return {name: (listed[name], body.get("application/json", {}).get("schema", {})) for name, body in bodies.items()}


def openenv(
    client: Callable[..., Any],
    action: Any,
    url: str,
    *,
    tool: str = "step",
    show: Callable[[Any], str] = lambda seen: _fields(seen),
    reset_with: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> type[Environment]:
    """Return the environment of an OpenEnv server: one tool, which takes a step.

    Args:
        client: Class of the environment's package, or OpenEnv's GenericEnvClient.
        action: Class of its actions, whose fields are the tool's arguments; or their JSON schema, to send a dict.
        url: The server's address.
        tool: The tool's name; the model also reads the description of `action`.
        show: Converts an observation to the model's text. Default: its fields as JSON.
        reset_with: Columns of the dataset that the server's reset takes, such as seed.
        timeout_s: Longest time in seconds to wait for a reply.
    """
    check_server("openenv", "url", url, "", "http://localhost:8000")
    limits = dict(connect_timeout_s=timeout_s, message_timeout_s=timeout_s, max_message_size_mb=MOST_REPLY_BYTES / 1e6)

    class OpenEnv(Environment, timeout_s=timeout_s):
        def _begin(self, row: dict[str, Any]) -> str | None:
            made = client(base_url=url, **limits)
            self._session = made.sync() if hasattr(made, "sync") else made
            return self._read(self._session.reset(**{name: row[name] for name in reset_with}))

        def _step(self, name: str, arguments: dict[str, Any]) -> str:
            if self._is_done:
                return "error: the episode has ended"
            try:
                taken = arguments if isinstance(action, Mapping) else action(**arguments)
            except (TypeError, ValueError) as error:  # The model's arguments cause it, as below.
                return f"error: {error}"
            try:
                result = self._session.step(taken)
            except RuntimeError as error:
                if "VALIDATION_ERROR" in str(error):
                    return f"error: {error}"
                raise
            self.earned[-1] = _number(result.reward or 0.0)
            return self._read(result)

        def _read(self, result: Any) -> str:
            self._is_done = bool(result.done)
            return show(result.observation)

    schema = action if isinstance(action, Mapping) else action.model_json_schema()
    own = {key: kind for key, kind in schema.get("properties", {}).items() if key != "metadata"}  # OpenEnv's, in all
    return with_tools(OpenEnv, {tool: (schema, {**schema, "properties": own})}, schema)


def _fields(seen: Any) -> str:
    """Return an observation's fields as JSON, without OpenEnv's fields; a text unchanged."""
    seen = seen.model_dump() if hasattr(seen, "model_dump") else seen
    if isinstance(seen, dict):
        seen = {name: cell for name, cell in seen.items() if name not in ("reward", "metadata")}
    return seen if isinstance(seen, str) else json.dumps(seen, default=str, ensure_ascii=False)


def _number(value: Any) -> float:
    if not isinstance(value, bool | int | float) or not abs(value) <= LARGEST:  # NaN compares as False
        raise ValueError(f"the reward is {value!r:.60}, no number from {-LARGEST:g} to {LARGEST:g}")
    return float(value)


# A server's tools as methods, with the signature and docstring from which transformers makes a schema ----------------


def with_tools(base: type, tools: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]], page: Any = None) -> Any:
    """Give a class a method for each tool, which calls `self._call(name, arguments)`.

    Args:
        base: The class.
        tools: By name, the tool's description and the JSON schema of its arguments.
        page: The page that the schemas' references point into.

    Raises:
        RuleError: if a method cannot have the name of a tool or of an argument.
    """
    for name, (said, schema) in tools.items():
        try:
            setattr(base, name, _method(name, said.get("description") or said.get("summary") or name, schema, page))
        except ValueError as error:
            raise RuleError(f"The tool {name!r} cannot be a method: {error}. Rename that, or leave it out.") from error
    base.tools = dict(tools)  # type: ignore[attr-defined]
    return base


def _method(name: str, about: str, schema: Mapping[str, Any], page: Any) -> Callable[..., str]:
    """Return a method that calls `self._call(name, arguments)`, with the signature and docstring of a tool.

    Raises ValueError for a name that a method or a parameter cannot have.

    Args:
        name: The tool's name.
        about: The tool's description.
        schema: JSON schema of the tool's arguments.
        page: The page that the schema's references point into.
    """

    def method(self: Any, /, **arguments: Any) -> str:
        return self._call(name, arguments)

    if not name.isidentifier() or name.startswith("_") or name in _TAKEN:
        raise ValueError(f"{name!r} is taken, or no name")
    schema = _resolve(schema, page)
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    kinds = {key: _type(field, page) for key, field in fields.items()}
    parts = [_Part("self", _Part.POSITIONAL_ONLY)]
    for key, kind in kinds.items():
        parts.append(_Part(key, _Part.KEYWORD_ONLY, default=_Part.empty if key in needed else None, annotation=kind))
    said = [f"    {key}: {' '.join(field.get('description', key).split())}" for key, field in fields.items()]
    method.__doc__ = "\n".join([" ".join(about.split()), "", "Args:", *said])
    method.__name__, method.__annotations__ = name, kinds | {"return": str}
    method.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    return method


def _resolve(schema: Mapping[str, Any], page: Any) -> Any:
    """Follow a schema's reference within its page, if any."""
    for part in schema["$ref"].split("/")[1:] if "$ref" in schema else ():
        page = page[part]
    return page if "$ref" in schema else schema


def _type(schema: Mapping[str, Any], page: Any) -> Any:
    """Return the type hint of a JSON schema; Any if it has no type."""
    schema = _resolve(schema, page)
    some = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(some) == 1:
        return _type(some[0], page)
    if schema.get("enum"):
        return Literal[tuple(schema["enum"])]
    if schema.get("type") == "array":
        return list[_type(schema.get("items", {}), page)]  # type: ignore[misc]
    return _TYPES.get(schema.get("type"), Any)
