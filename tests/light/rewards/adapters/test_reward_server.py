"""`trl-ext score serve`: rules over HTTP, of bounded size, to this machine alone."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from tests.documents import BLOCKS
from trl_ext import RuleSet
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import Answer, Call, Length, Row
from trl_ext.rewards.adapters.server import REQUEST, RewardServer

pytestmark = pytest.mark.slow

PAGE = "docs/reference/own_rules.md"
BATCH = {"prompts": ["9 * 2 ="] * 2, "completions": ["A: 18", "A: 17"], "columns": {"answer": ["18", "18"]}}


@pytest.fixture(scope="module")
def server():
    rules = RuleSet([Answer(), Length(high=3, unit="words", weight=0.1, gate="answer")])
    with RewardServer(rules, port=0, max_body_bytes=2**16) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, body, method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_totals_and_the_values_of_each_rule_come_back(server):
    status, answer = ask(server, "/score", BATCH)
    assert (status, answer["totals"]) == (200, pytest.approx([1.1, 0.0]))
    assert answer["rules"]["answer"] == {"values": [1.0, 0.0], "statuses": ["ok", "ok"]}
    assert answer["rules"]["length"]["statuses"] == ["ok", "gated"]
    status, answer = ask(server, "/score", BATCH | {"columns": {"answer": ["unreadable", "18"]}})
    assert (status, answer["totals"]) == (200, [None, 0.0]), "no total is null"


def test_nemo_gym_is_answered_with_its_body_and_the_reward(server):
    text = {"type": "output_text", "text": "A: 18", "annotations": []}
    said = [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}]
    said += [{"type": "message", "role": "assistant", "content": [part]} for part in ({**text, "text": "17"}, text)]
    body = {"responses_create_params": {"input": [{"role": "user", "content": "9 * 2 ="}]}, "answer": "18"}
    assert ask(server, "/seed_session", body) == (200, {})
    status, found = ask(server, "/verify", body | {"response": {"output": said}})
    assert (status, found["reward"], found["rules/answer"]) == (200, pytest.approx(1.1), 1.0)
    assert found.items() >= body.items() and found["response"]["output"] == said
    assert ask(server, "/verify", body | {"response": {"output": said[:1]}})[1]["reward"] == 0.0
    assert ask(server, "/verify", body)[0] == 400
    status, found = ask(server, "/verify", body | {"response": {"output": said}, "answer": "unreadable"})
    assert (status, found["error"]) == (500, "No rule has a value for the completion.")


@pytest.mark.parametrize("odd", [b"NaN", b"[1e999]", *(b"[" * deep + b"]" * deep for deep in (900, 940, 980, 990))])
def test_what_nemo_gyms_reply_cannot_hold_is_answered_without_a_traceback(server, odd, capfd):
    said = b'"response": {"output": [{"type": "message", "content": "A: 18"}]}, "answer": "18"'
    body = b'{"responses_create_params": {"input": "9 * 2 ="}, "kind": ' + odd + b", " + said + b"}"
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", "/verify", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.read()
    connection.close()
    assert response.status == 400 or (response.status == 200 and odd in found.replace(b" ", b"") and odd[:2] == b"[[")
    assert response.status == 200 or json.loads(found)["error"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_that_cannot_be_judged_is_told_why(server, subtests):
    for body, says in (
        *((b"{", "not JSON"), (b"[" * 30_000, "not JSON"), (b"\xff\xfe", "not JSON"), ([], "is a list")),
        *(({}, "lacks 'completions'"), ({"completions": "A: 18"}, "'completions' is a str")),
        ({"completions": ["A: 18"], "answers": ["18"]}, "unknown key 'answers'"),
        ({"completions": ["A: 18"], "columns": {"answer": "18"}}, "column 'answer' is no array"),
        ({"completions": ["A: 18"], "columns": {"prompts": ["p"]}}, "outside of them"),
        ({"completions": ["A: 18"], "completion_ids": [["x"]], "columns": {}}, "lists of integers"),
        ({"completions": ["A: 18"]}, "reads the column 'answer'"),
        ({"completions": ["A: 18"], "columns": {"answer": []}}, "has 0 rows for 1"),
        ({"completions": [7], "columns": {"answer": ["18"]}}, "completion is a int"),
        ({"completions": [[{"role": "assistant", "content": [7]}]], "columns": {"answer": ["18"]}}, "content is"),
    ):
        with subtests.test(body=body):
            status, answer = ask(server, "/score", body)
            assert status == 400
            assert says in answer["error"]


def test_requests_that_are_too_long_of_another_origin_or_path_have_their_status(server):
    assert ask(server, "/score", b" " * (2**16 + 1))[0] == 413
    assert ask(server, "/score", BATCH)[0] == 200
    # A web page of another origin cannot ask for JSON unasked.
    assert ask(server, "/score", BATCH, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(server, "/reward", BATCH)[0] == 404
    assert ask(server, "/health", b"", method="GET") == (200, {"status": "ok"})
    assert ask(server, "/etc/passwd", b"", method="GET")[0] == 404


def test_a_body_of_unknown_length_is_asked_for_its_length(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("POST", "/score")
    for header, value in (("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")):
        connection.putheader(header, value)
    connection.endheaders()  # no chunk: the server answers before any, and closes the connection
    response = connection.getresponse()
    assert response.status == 411 and "The request has no Content-Length" in json.loads(response.read())["error"]
    connection.close()


ANY = [
    None, True, 7, 1.5, "x", "\ud800", [], {}, [None], [True], [7], [1e400], ["x"], [[]], [{}], [["x"]], [{"x": 7}],
    [[{}]], [[{"role": 7, "content": None}]], [[{"role": "user", "content": [None]}]], {"answer": [None]},
    {"answer": [{}]}, {"answer": [[[]]]}, {"answer": [True]}, {"": [1]}, {"answer": None},
]  # fmt: skip
WHOLE = {
    "/score": {"prompts": ["p"], "completions": ["A: 18"], "completion_ids": [[1]], "columns": {"answer": ["18"]}},
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, body in WHOLE.items() for name in [*body, None]])
def test_any_json_in_any_place_gets_an_answer(server, path, name, capfd):
    """The place is a key of the body, or the body; what is no list of the right kind is a sentence."""
    assert ask(server, path, WHOLE[path])[0] == 200
    for value in ANY:
        status, answer = ask(server, path, value if name is None else WHOLE[path] | {name: value})
        assert status in (200, 400) and (status == 200 or answer["error"]), value
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8300", "", "[::1", "localhost.evil.example"])
def test_a_page_whose_name_leads_here_is_refused(server, host):
    for method, path in (("POST", "/score"), ("GET", "/health")):
        status, answer = ask(server, path, BATCH, method, Host=host)
        assert status == 403 and "Host" in answer["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8300", "127.0.0.1", "[::1]:8300"])
def test_this_machines_names_are_answered(server, host):
    assert ask(server, "/score", BATCH, Host=host)[0] == 200


def test_other_machines_need_the_token():
    rules = RuleSet([Answer()])
    with pytest.raises(ConfigError, match="Give a token by --token_env"):
        RewardServer(rules, host="0.0.0.0", port=0)
    with RewardServer(rules, host="0.0.0.0", port=0, token="s3cret\u00e9") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        right = "Bearer s3cret\u00e9".encode().decode("latin-1")
        tried = ["", "Bearer ", "Bearer s3cret", "Basic s3cret", right]
        asked = {given: ask(server, "/score", BATCH, Authorization=given)[0] for given in tried}
        health = ask(server, "/health", b"", "GET")[0]
        server.shutdown()
        thread.join()
    assert asked == dict.fromkeys(asked, 401) | {right: 200} and health == 401


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "Give a token by --token_env"),
        (["--token_env", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN holds no token"),
    ],
)
def test_the_command_does_not_open_to_other_machines_without_a_token(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.yaml").write_text("rules: [{rule: answer}]\n")
    with pytest.raises(SystemExit, match="2"):
        main(["score", "serve", "rules.yaml", "--host", "0.0.0.0", "--port", "0", *options])
    assert says in capsys.readouterr().err


def test_one_connection_asks_many_times(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    for _ in range(3):
        connection.request("POST", "/score", json.dumps(BATCH), {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["totals"] == pytest.approx([1.1, 0.0])
    connection.close()


def test_a_client_that_goes_away_is_no_error(server, capfd):
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", server.server_port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets the connection
        client.sendall(b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        client.close()
    assert ask(server, "/score", BATCH)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def raises(row: Row) -> float:
    raise KeyError("gold")


def test_a_rule_that_raises_is_an_error_of_the_server():
    with RewardServer(RuleSet([Call(raises, isolate=False)]), port=0) as server:
        with pytest.raises(RuleError, match="KeyError"):
            server.answer("/score", {"completions": ["A: 18"]})


def test_a_set_that_normalises_is_refused():
    with pytest.raises(RuleError, match="normalise=True"):
        RewardServer(RuleSet([Answer()], normalise=True), port=0)


def test_it_listens_to_this_machine_alone_and_names_a_port_that_is_taken(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"port {server.server_port}"):
        RewardServer(RuleSet([Answer()]), port=server.server_port)


def test_the_page_shows_the_schema_that_requests_are_held_to():
    shown = [json.loads(block.text) for block in BLOCKS if block.page == PAGE and block.language == "json"]
    assert REQUEST in shown


def test_the_command_serves_as_printed_until_it_is_told_to_end(tmp_path):
    (printed,) = (line for block in BLOCKS if block.page == PAGE for line in block.commands() if "score serve" in line)
    (tmp_path / "rules.yaml").write_text("rules: [{rule: answer}, {rule: length, high: 9, gate: answer}]\n")
    command = printed.removesuffix("&").replace("8300", "0").split()
    assert command[:2] == ["trl-ext", "score"]
    code = "import sys; from trl_ext.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command[1:]], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        said = process.stdout.readline()
        assert said.startswith("Rule 'length' counts tokens: only /score can send them (completion_ids)")
        line = process.stdout.readline()
        assert line.startswith("Serving rules.yaml at http://127.0.0.1:")
        port = int(line.split(": POST")[0].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(
            "POST", "/score", json.dumps(BATCH | {"completion_ids": [[1], [2]]}), {"Content-Type": "application/json"}
        )
        assert json.loads(connection.getresponse().read())["totals"] == [2.0, 0.0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.stdout.close()
