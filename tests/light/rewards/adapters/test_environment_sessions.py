"""Sessions with servers of environments: tools made of their schemas, rewards of turns, and servers that die."""

import inspect
import json
import logging
import time
from contextlib import suppress
from typing import Any, Literal

import pytest

from tests import environment_servers
from tests.environment_servers import ADD, EnvClient, GymServer
from tests.nightly import nightly
from trl_ext.errors import RuleError
from trl_ext.rewards.adapters.environments import EnvironmentReward, nemo_gym, openenv, with_tools

PROMPT = [{"role": "user", "content": "2 + 2 ="}]


def call(name: str, **arguments: Any) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict, text: str = "") -> dict:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def played(made: Any, completion: list[dict], level: int = 2) -> list[dict]:
    """Play as TRL does: the calls of each turn but one that ends the completion, with their results behind it."""
    made.reset(prompt=PROMPT, level=level)
    found = []
    for message in completion:
        found.append(message)
        calls = message["tool_calls"] if message is not completion[-1] else []
        for function in (one["function"] for one in calls):
            tool = getattr(made, function["name"], None)
            result = tool(**function["arguments"]) if tool else "error"
            found.append({"role": "tool", "name": function["name"], "content": result})
    return found


def scored(reward: EnvironmentReward, *episodes: tuple[Any, list[dict]]) -> list[Any]:
    made, completions = zip(*episodes, strict=True)
    logged: dict[str, float] = {}
    rewards = reward([PROMPT] * len(made), list(completions), list(made), log_metric=logged.__setitem__)
    assert logged == {"rules/environment/lost_frac": sum(bool(one.lost) for one in made) / len(made)}
    return rewards


TWO_TURNS = [turn(call("add", a=1, b=2)), turn(text="3")]


# Tools ------------------------------------------------------------------------------------------------------------


def test_tools_are_methods_with_what_the_server_says_of_them():
    with GymServer() as server:
        made = nemo_gym(server.url)
        assert set(made.tools) == {"add", "count"}
        add = made().add
        assert add.__name__ == "add" and add.__doc__.startswith(
            "Add two numbers. To the total.\n\nArgs:\n    a: A num"
        )
        assert {name: one.annotation for name, one in inspect.signature(add).parameters.items()} == {
            "a": int,
            "b": int,
        }
        assert set(nemo_gym(server.url, tools=["count"]).tools) == {"count"}
        with pytest.raises(RuleError, match=r"does not list such tools: KeyError.'subtract'"):
            nemo_gym(server.url, tools=["subtract"])
    with pytest.raises(RuleError, match=r"does not list such tools: .*Start it"):
        nemo_gym(server.url)
    assert set(nemo_gym(server.url, tools=[{"type": "function", "name": "add", "parameters": ADD}]).tools) == {"add"}


def test_types_of_arguments_are_those_of_the_schema():
    fields = {
        "one": {"enum": ["left", "right"]},
        "some": {"type": "array", "items": {"type": "number"}},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "deep": {"$ref": "#/$defs/Deep"},
        "odd": {},
    }
    page = {"$defs": {"Deep": {"type": "object"}}}
    schema = {"properties": fields, "required": ["one"]}
    method = with_tools(type("Made", (), {}), {"act": ({}, schema)}, page).act
    kinds = {"one": Literal["left", "right"], "some": list[float], "maybe": bool, "deep": dict, "odd": Any}
    assert method.__annotations__ == {**kinds, "return": str}
    needed = [one.name for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    assert needed == ["self", "one"]


@pytest.mark.parametrize(
    "tools, said",
    [
        ([{"name": "reset"}], "'reset' is taken"),
        ([{"name": "lost"}], "'lost' is taken"),
        ([{"name": "_secret"}], "'_secret' is taken, or no name"),
        ([{"name": "do it"}], "'do it' is taken, or no name"),
        ([{"name": "go", "parameters": {"properties": {"from": {}}}}], "'from'"),
        ([{"name": "go", "parameters": {"properties": {"max-n": {}}}}], "'max-n'"),
    ],
)
def test_a_tool_that_cannot_be_a_method_is_refused(tools, said):
    with pytest.raises(RuleError, match=said):
        nemo_gym("http://127.0.0.1:9", tools=tools)


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(url="127.0.0.1:8000"), "nemo_gym: url is"),
        (dict(url="http://me:pw@host"), "password"),
        (dict(api_key_env="NOT_SET_HERE"), "not set"),
        (dict(api_key_env="sk-1"), "no name of an environment variable"),
    ],
)
def test_an_address_and_a_key_are_checked_as_those_of_judges_are(fields, said):
    with pytest.raises(RuleError, match=said):
        nemo_gym(**{"url": "http://127.0.0.1:9", "tools": [{"name": "add"}]} | fields)


# NeMo-Gym ---------------------------------------------------------------------------------------------------------


def test_an_episode_is_one_session_from_its_seed_to_its_verdict():
    with GymServer() as server:
        made = nemo_gym(server.url, turn_reward="reward")()
        for level in (2, 3):
            completion = [
                turn(call("add", a=1, b=2), call("count")),
                turn(call("nobodys"), text="3 ?"),
                turn(text="3"),
            ]
            completion = played(made, completion, level)
            (found,) = scored(EnvironmentReward(), (made, completion))
            assert found == [0.125, 0.0, 1 / (1 + abs(3 - 2 * level))]
        assert len(server.sessions) == 2 and [path for path, *_ in server.asked[:4]] == [
            *("/seed_session", "/add", "/count", "/verify")
        ]
        seed, verdict = server.asked[0][1], server.asked[3][1]
    assert seed["level"] == 2 and seed["responses_create_params"]["input"] == PROMPT
    kinds = [item["type"] for item in verdict["response"]["output"]]
    assert kinds == ["function_call"] * 2 + ["function_call_output"] * 2 + [
        *("message", "function_call", "function_call_output", "message")
    ]
    first, _, result, *_ = verdict["response"]["output"]
    assert first["call_id"] == result["call_id"] and (first["arguments"], result["output"]) == (
        '{"a": 1, "b": 2}',
        "3",
    )


def test_calls_that_are_not_run_earn_nothing_and_wrong_arguments_are_the_models():
    with GymServer() as server:
        made = nemo_gym(server.url, turn_reward="reward")()
        completion = played(made, [turn(call("add", a="x")), turn(call("count")), turn(call("count"))])
        assert "a and b have to be integers" in completion[1]["content"]
        assert scored(EnvironmentReward(), (made, completion)) == [[0.0, 0.125, 0.2]]


BAD = {
    "HTML": b"<html>busy</html>",
    "another key": b'{"score": 1}',
    "a text": b'{"reward": "1"}',
    "NaN": b'{"reward": NaN}',
    "1e39": b'{"reward": 1e39}',
    "an int without end": b'{"reward": -1' + b"0" * 400 + b"}",
    "deep": b"[" * 100_000,
    "3 MB": b'"' + b"a" * 3_000_000 + b'"',
    "nothing": b"",
    "down": 503,
    "gone": 404,
    "elsewhere": 302,
    "never": 3.0,
}


UNBOUNDED = ("NaN", "1e39", "an int without end")
HARMLESS = {("another key", "add"), *((what, "seed_session") for what in ("another key", "a text", *UNBOUNDED))}
CASES = [(what, where) for what in BAD for where in ("seed_session", "add", "verify") if (what, where) not in HARMLESS]


@pytest.mark.parametrize("what, where", CASES)
def test_an_environment_that_dies_costs_its_row_the_floor(what, where):
    timeout_s = 1.0 if what == "never" else 30.0  # on a busy machine a reply that comes may take long
    with GymServer(lambda path, number: BAD[what] if path == f"/{where}" else None) as server:
        made = nemo_gym(server.url, turn_reward="reward", timeout_s=timeout_s)()
        completion = played(made, TWO_TURNS)
        assert scored(EnvironmentReward(floor=-1.0), (made, completion)) == [-1.0]
        assert made.lost and len(made.lost) <= 300
        if where == "add":
            assert completion[1]["content"] == "error: the environment is gone"
        asked = len(server.asked)
        server.answer = lambda path, number: None  # the next episode is a new one
        assert scored(EnvironmentReward(), (made, played(made, TWO_TURNS))) == [[0.0, 0.5]]
        assert len(server.asked) == asked + 3


def test_no_call_of_the_model_ends_more_than_itself():
    """TRL answers a call without arguments, or of a name that is none, by itself."""
    odd = [{"name": "add"}, {"name": "add", "arguments": "1, 2"}, {"name": ["add"], "arguments": {}}]
    calls = [{"type": "function", "function": function} for function in odd]
    with GymServer() as server:
        made = nemo_gym(server.url)()
        made.reset(prompt=PROMPT, level=2)
        assert scored(EnvironmentReward(), (made, [turn(*calls), turn(text="3")])) == [[0.0, 0.2]]


def test_what_a_server_says_reaches_the_model_in_its_script_and_the_tokenizer_whole():
    with GymServer(lambda path, number: b'{"said": "\\u4e2d\\ud800"}' if path == "/add" else None) as server:
        made = nemo_gym(server.url)()
        made.reset(prompt=PROMPT, level=2)
        assert made.add(a=1, b=2) == '{"said": "\u4e2d?"}' and not made.lost


def test_a_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("GYM_KEY", "secret-\n7")
    with GymServer(lambda path, number: 503 if path == "/verify" else None) as server:
        made = nemo_gym(server.url, api_key_env="GYM_KEY")()
        scored(EnvironmentReward(), (made, played(made, TWO_TURNS)))
    assert all(headers["Authorization"] == "Bearer secret-7" for _, _, headers in server.asked)
    assert "secret-7" not in made.lost + repr(vars(made))


@pytest.mark.parametrize(("key", "shown"), [("secret-7", "***"), ("0.5", "0.5"), ("reward", "reward"), ("1", "1")])
def test_a_key_that_a_server_quotes_is_shown_to_no_model_and_changes_no_reward(key, shown, monkeypatch):
    monkeypatch.setenv("GYM_KEY", key)
    replies = {"/add": {"said": f"Bearer {key}", "gain": 0.5}, "/verify": {"reward": 1.0, "said": key}}
    with GymServer(lambda path, number: json.dumps(replies[path]).encode() if path in replies else None) as server:
        made = nemo_gym(server.url, api_key_env="GYM_KEY", turn_reward="gain")()
        made.reset(prompt=PROMPT, level=2)
        assert json.loads(made.add(a=1, b=2))["said"] == f"Bearer {shown}"
        assert scored(EnvironmentReward(), (made, TWO_TURNS)) == [[0.5, 1.0]]


ODD_TURNS = {
    "no turn of the model": [{"role": "tool", "name": "add", "content": "3"}],
    "nothing": [],
    "a call without type": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}],
    "a call that is no mapping": [{"role": "assistant", "tool_calls": ["add", None, 5]}],
    "calls that are no list": [{"role": "assistant", "tool_calls": {"function": {"name": "add"}}}],
    "a call without function": [{"role": "assistant", "tool_calls": [{"type": "function"}]}],
    "a function that is a text": [{"role": "assistant", "tool_calls": [{"type": "function", "function": "add"}]}],
    "a function without name": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}],
    "a name that is a list": [{"role": "assistant", "tool_calls": [call(["add"])]}],
    "another type": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}],
    "arguments that are a text": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "1"}}]}
    ],
    "no content": [{"role": "assistant", "content": None, "tool_calls": None}],
    "no role": [{"content": "3"}],
    "parts": [{"role": "assistant", "content": [{"type": "text", "text": "3"}, {"type": "image"}]}],
}


@pytest.mark.parametrize("what", ODD_TURNS)
def test_a_completion_of_any_form_earns_what_the_server_gives(what):
    with GymServer(lambda path, number: b'{"reward": 1.0}' if path == "/verify" else None) as server:
        made = nemo_gym(server.url)()
        made.reset(prompt=PROMPT, level=2)
        (found,) = scored(EnvironmentReward(), (made, ODD_TURNS[what]))
    assert found in (1.0, [1.0]) and not made.lost


@pytest.mark.parametrize("completion", ["3", [None], ["3"]])
def test_a_completion_without_messages_costs_its_row_alone(completion):
    with GymServer() as server:
        kind = nemo_gym(server.url)
        odd, right = kind(), kind()
        odd.reset(prompt=PROMPT, level=2)
        found = scored(EnvironmentReward(floor=-1.0), (odd, completion), (right, played(right, TWO_TURNS)))
    assert found[0] == -1.0 and found[1] != -1.0 and odd.lost and not right.lost


def test_the_first_is_said_and_more_than_five_percent_of_twenty_steps_end_the_run(caplog):
    with GymServer(lambda path, number: 503 if path == "/add" else None) as server:
        made, reward = nemo_gym(server.url), EnvironmentReward()
        batch = [made() for _ in range(10)]

        def step() -> None:
            scored(reward, *((one, played(one, TWO_TURNS if one is batch[0] else [turn(text="3")])) for one in batch))

        with caplog.at_level(logging.WARNING):
            for _ in range(10):
                step()  # of 200 rows ten may be lost
        assert len(caplog.records) == 1 and "its row earns 0: ServerError: HTTP 503" in caplog.text
        with pytest.raises(RuleError, match=r"11 of the last 110 rows lost their environment, more than 5%.*HTTP 503"):
            step()


def drips(connection: Any) -> None:
    """Send a header that does not end, faster than any time-out of a socket."""
    with suppress(OSError):
        connection.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(60):
            connection.write(b"X")
            time.sleep(0.05)


def generated(made: list[Any], completion: list[dict]) -> list[tuple[Any, list[dict]]]:
    """Play as TRL does: each call of all rows, one row after the other."""
    for one in made:
        one.reset(prompt=PROMPT, level=2)
    results = [one.add(a=1, b=2) for one in made]
    return [
        (one, [completion[0], {"role": "tool", "name": "add", "content": found}, *completion[1:]])
        for one, found in zip(made, results, strict=True)
    ]


HANGS = [
    *[(where, 2.0) for where in ("seed_session", "add", "verify")],
    ("add", drips),
    nightly("seed_session", drips),
    nightly("verify", drips),
]


@pytest.mark.parametrize("where, hang", HANGS)
def test_a_server_that_hangs_is_waited_for_three_times_and_named_at_the_first(where, hang, caplog):
    warned: list[bool] = []  # before each request that hangs

    def answer(path: str, number: int) -> Any:
        if path == f"/{where}":
            warned.append("did not reply within 0.6 s" in caplog.text)
            return hang
        return None

    with GymServer(answer) as server, caplog.at_level(logging.WARNING):
        rows = [made() for made in [nemo_gym(server.url, timeout_s=0.6)] * 16]
        server.answer = lambda path, number: None
        assert scored(EnvironmentReward(), *generated(rows, TWO_TURNS)) == [[0.0, 0.5]] * 16
        server.answer = answer
        assert scored(EnvironmentReward(floor=-1.0), *generated(rows, TWO_TURNS)) == [-1.0] * 16
        assert warned == [False, True, True] and caplog.text.count("its row is lost") == 1
        assert "3 calls in a row" in rows[-1].lost
        server.answer = lambda path, number: None
        time.sleep(0.6)  # then it is tried again
        assert scored(EnvironmentReward(), *generated(rows, TWO_TURNS)) == [[0.0, 0.5]] * 16


def test_late_replies_with_others_between_them_cost_their_rows_alone():
    calls: list[str] = []

    def answer(path: str, number: int) -> float | None:
        calls.extend([path] * (path == "/add"))
        return 1.0 if path == "/add" and len(calls) % 3 else None

    with GymServer(answer) as server:
        rows = [made() for made in [nemo_gym(server.url, timeout_s=0.6)] * 7]
        generated(rows, TWO_TURNS)
    assert [bool(one.lost) for one in rows] == [True, True, False] * 2 + [True]


# OpenEnv ----------------------------------------------------------------------------------------------------------


def adds(**options: Any) -> Any:
    return openenv(EnvClient, ADD, "http://127.0.0.1:9", tool="add", reset_with=["level"], **options)()


def test_a_step_is_a_tool_and_its_reward_its_turns():
    made = adds()
    assert made.reset(prompt=PROMPT, level=2) == "2 + 2 =" and len(EnvClient.open) == 1
    completion = played(made, [turn(call("add", a=1, b=1)), turn(call("add", a=0, b=2)), turn(call("add", a=1, b=2))])
    completion = played(
        made, [*completion[:1], turn(call("add", a=0, b=2)), turn(call("add", a=5, b=6)), turn(text="4")]
    )
    assert [message["content"] for message in completion] == [
        *("", "2", "", "4", "", "error: the episode has ended", "4")
    ]
    assert scored(EnvironmentReward(), (made, completion)) == [[0.0, 0.25, 0.0, 0.0]]
    assert not EnvClient.open, "a session was left open"


def test_a_client_that_raises_loses_the_row_and_its_session_is_closed(monkeypatch):
    made = adds()
    completion = played(made, TWO_TURNS)
    assert scored(EnvironmentReward(), (made, completion)) == [[0.25, 0.0]]
    monkeypatch.setattr(EnvClient, "step", lambda self, action: 1 / 0)
    ends = EnvClient.close
    monkeypatch.setattr(EnvClient, "close", lambda self: [ends(self), 1 / 0])
    completion = played(made, TWO_TURNS)
    assert scored(EnvironmentReward(-0.5), (made, completion)) == [-0.5] and "ZeroDivisionError" in made.lost
    assert not EnvClient.open


class Asked:
    """An action of a package: its own errors are the model's doing, as those that a server finds in an action."""

    @staticmethod
    def model_json_schema() -> dict:
        return {**ADD, "properties": {**ADD["properties"], "metadata": {}}, "description": "Add two numbers."}

    def __new__(cls, **arguments: Any) -> Any:
        if "a" not in arguments:
            raise ValueError("a is missing")
        return arguments


def test_arguments_that_an_action_or_the_server_refuses_are_the_models(monkeypatch):
    made = openenv(EnvClient, Asked, "http://127.0.0.1:9", tool="add", reset_with=["level"])()
    assert list(inspect.signature(made.add).parameters) == ["a", "b"] and made.add.__doc__.startswith(
        "Add two numbers."
    )
    made.reset(level=2)
    assert made.add(b=1) == "error: a is missing"

    def refuses(self: Any, action: dict) -> None:
        raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")

    monkeypatch.setattr(EnvClient, "step", refuses)
    assert made.add(a="x").startswith("error: Server error: Invalid message") and not made.lost
    made.reset(level=2)
    assert not made.lost and made.earned == []
    made._close()


def test_rows_of_other_environments_are_not_scored():
    made = adds()
    rows = [played(made, TWO_TURNS), TWO_TURNS]
    rewards = EnvironmentReward()([PROMPT] * 2, rows, [made, object()], log_metric=lambda *_: None)
    assert rewards == [[0.25, 0.0], None]
    assert environment_servers.Game(4).score() == 0.2
