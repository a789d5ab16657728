"""A server's key: of any length it changes no value, and a long one that the server quotes is shown nowhere."""

import json

import pytest

from tests.chat_server import ChatServer, shown
from trl_ext.rewards import RuleSet

SERVER = ChatServer()
SHORT = ("1", "10", "0", "3", "a", "e", "null", "reward", "EMPTY")
LONG = 'real/long"key-0123456789abcdef'
ASK = "retries: 0, api_key_env: SERVER_KEY}"


def answer(request):
    """Give "right" the best value and other texts a lower one, as a judge or a verifier that quotes its key."""
    if "model" in request:
        return json.dumps({"reasoning": f"Key {LONG}.", "score": 10 if "right" in shown(request) else 3})
    return json.dumps({"reward": 1.0 if "right" in request["completion"] else 0.5, "key": LONG}).encode()


def judged(tmp_path, key, monkeypatch, answer):
    """Return verifier's and judge's parts of "right" and of another text, by a YAML file whose servers take `key`."""
    monkeypatch.setenv("SERVER_KEY", key)
    file = tmp_path / "rules.yaml"
    file.write_text(
        f"rules:\n  - {{rule: remote, url: {SERVER.url}/verify, {ASK}\n"
        f"  - {{rule: judge, model: m, base_url: {SERVER.url}, {ASK}\n"
        "limits: {max_infra_frac: 1.0}\n"
    )
    SERVER.answers(answer)
    found = RuleSet.from_yaml(file).explain_all(["q", "q"], [f"right {key}", f"other {key}"])
    return [part for one in found for part in one.parts]


@pytest.mark.parametrize("key", [*SHORT, LONG])
def test_a_key_of_any_length_changes_no_value(key, tmp_path, monkeypatch):
    parts = judged(tmp_path, key, monkeypatch, answer)
    assert [part.value for part in parts] == pytest.approx([1.0, 1.0, 0.5, 2 / 9])
    assert {part.status for part in parts} == {"ok"}


@pytest.mark.parametrize(
    "said",
    [
        answer,
        lambda request: f"I was sent {LONG}.",
        lambda request: json.dumps({"error": f"{'x' * 190} {LONG} is no key"}).encode(),
        lambda request: (401, {}, json.dumps({"error": f"{'x' * 190} {LONG} is no key"}).encode()),
        lambda request: (503, {}, f"{'x' * 190} {LONG} is no key".encode()),
    ],
    ids=["a value", "a text", "another form", "refused", "down"],
)
def test_a_long_key_that_a_server_quotes_is_in_no_detail(said, tmp_path, monkeypatch):
    for part in judged(tmp_path, LONG, monkeypatch, said):
        assert "***" in part.detail
        assert "real" not in part.detail and "0123" not in part.detail
