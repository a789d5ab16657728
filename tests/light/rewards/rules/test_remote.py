"""A verifier behind HTTP: what is posted, which number of its reply counts, and what neither side can bring about."""

import json
from dataclasses import replace

import pytest

from tests.chat_server import ChatServer
from trl_ext.errors import RuleError
from trl_ext.rewards import Remote, Row, RuleSet
from trl_ext.rewards.config import build_rules

pytestmark = pytest.mark.slow

SERVER = ChatServer()


def reply(**found):
    return lambda request: json.dumps(found).encode()


def judged(answer, completion="42", columns=None, **fields):
    SERVER.answers(answer)
    part = RuleSet([Remote(SERVER.url, **fields)]).explain("What is 6 * 7?", completion, **(columns or {})).parts[0]
    return part, SERVER


def test_prompt_completion_and_columns_are_posted_and_the_number_is_the_value():
    part, server = judged(reply(reward=0.5, note="half"), columns={"gold": "42"}, send=["gold"])
    assert (part.value, part.status) == (0.5, "ok")
    (request,) = server.requests
    assert (request["prompt"], request["completion"], request["gold"]) == ("What is 6 * 7?", "42", "42")


def test_nemo_gyms_verifiers_are_asked_in_their_form():
    def answer(request):
        asked = request["responses_create_params"]["input"][0]["content"]
        said = request["response"]["output"][0]["content"][0]["text"]
        is_right = (asked, said, request["expected_answer"]) == ("What is 6 * 7?", "42", "42")
        return json.dumps({**request, "reward": float(is_right)}).encode()

    part, _ = judged(answer, columns={"expected_answer": "42"}, form="nemo_gym", send=["expected_answer"])
    assert part.value == 1.0


def test_a_body_of_ones_own_and_a_number_that_lies_deeper():
    body = '{"text": {{ completion | tojson }}, "gold": {{ gold | tojson }}}'
    part, server = judged(
        reply(result={"score": 7}), 'say "hi"\n', {"gold": 1}, body=body, value="result.score", bounds=(0, 10)
    )
    assert part.value == 7.0
    assert server.requests == [{"text": 'say "hi"\n', "gold": 1}]


@pytest.mark.parametrize("said", ["the key secret-7x is wrong", "x" * 270 + " secret-7x", "see ?code=hidden-8x"])
def test_what_the_server_is_sent_and_quotes_is_hidden_before_its_reply_is_cut(said, monkeypatch):
    monkeypatch.setenv("VERIFIER_KEY", "secret-7x")
    for answer in (reply(reward=0.5, note=said), reply(error=said), lambda request: said.encode()):
        SERVER.answers(answer)
        rule = Remote(f"{SERVER.url}/verify?code=hidden-8x", api_key_env="VERIFIER_KEY", retries=0)
        (verdict,) = rule.score_batch([Row("q", "42", None, {})])
        assert "***" in verdict.detail and "secret" not in verdict.detail and "hidden" not in verdict.detail


def test_addresses_are_not_logged(caplog):
    caplog.set_level("INFO")
    SERVER.answers(reply(reward=0.5))
    Remote(f"{SERVER.url}/verify?code=hidden-8x").score_batch([Row("q", "42", None, {})])
    assert "hidden-8x" not in caplog.text


BAD = {
    "HTML": (b"<html>busy</html>", "no_score"),
    "another key": (b'{"score": 1}', "no_score"),
    "a list of verdicts": (b'{"reward": [1, 0]}', "no_score"),
    "a text": (b'{"reward": "1"}', "no_score"),
    "NaN": (b'{"reward": NaN}', "no_score"),
    "out of bounds": (b'{"reward": 100}', "no_score"),
    "a list": (b"[1]", "no_score"),
    "deep": (b"[" * 100_000, "no_score"),
    "3 MB": (b'{"reward": 1, "x": "' + b"a" * 3_000_000 + b'"}', "no_score"),
    "refused": (422, "refused"),
    "down": (503, "infra_error"),
    "elsewhere": ((302, {"Location": "http://127.0.0.1:9/"}), "infra_error"),
}


@pytest.mark.parametrize("what", BAD)
def test_another_reply_earns_the_floor_and_a_server_that_fails_has_no_value(what):
    answer, status = BAD[what]
    part, _ = judged(lambda request: answer, retries=0)
    assert part.status == status
    assert part.value == (None if status == "infra_error" else 0.0)


def test_a_server_that_never_answers_is_given_up():
    import time

    part, _ = judged(lambda request: time.sleep(1) or b"{}", timeout_s=0.1, retries=0)
    assert part.status == "infra_error" and "no answer within 0.1 s" in part.detail


def test_equal_rows_are_asked_once_and_a_long_completion_never():
    server = SERVER.answers(reply(reward=True))
    rules = RuleSet([Remote(SERVER.url, max_chars=10)])
    assert rules(completions=["a", "a", "b", "x" * 11]) == [1.0, 1.0, 1.0, 0.0]
    assert len(server.requests) == 2


def test_a_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("VERIFIER_KEY", "secret-7")
    part, server = judged(lambda request: (503, {}), api_key_env="VERIFIER_KEY", retries=0)
    assert server.headers[0]["authorization"] == "Bearer secret-7"
    assert "secret-7" not in part.detail and "secret-7" not in repr(Remote(SERVER.url, api_key_env="VERIFIER_KEY"))


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(url="localhost:8000"), "url is"),
        (dict(url="http://me:pw@host/"), "password"),
        (dict(form="other"), "form"),
        (dict(send="gold"), "list of columns"),
        (dict(value=""), "key of the number"),
        (dict(bounds=(1, 0)), "bounds"),
        (dict(body="{{ completion"), "not valid Jinja"),
        (dict(body="{}"), "does not show"),
        (dict(body="{{ completion | tojson }}", form="nemo_gym"), "next to form"),
        (dict(api_key_env="NOT_SET_HERE"), "not set"),
    ],
)
def test_a_field_that_is_wrong_is_told(fields, said):
    with pytest.raises(RuleError, match=said):
        Remote(**{"url": "http://localhost/verify"} | fields)


def test_it_is_a_rule_of_a_yaml_file():
    entry = {"rule": "remote", "url": "http://localhost:8000/verify", "form": "nemo_gym", "send": ["answer"]}
    (rule,) = build_rules({"rules": [entry]})["rules"]
    assert rule == replace(Remote("http://localhost:8000/verify"), form="nemo_gym", send=("answer",))
