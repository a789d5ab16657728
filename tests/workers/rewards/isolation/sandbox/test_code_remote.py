"""Code in a sandbox elsewhere: a stand-in for SandboxFusion, which runs programs in our own."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from trl_ext.rewards import Row, RuleSet
from trl_ext.rewards.isolation.sandbox import api as sandbox
from trl_ext.rewards.rules.code import Code

SECRET = "expected-481"
TESTS = [{"input": "481", "output": SECRET}, {"input": "1", "output": "expected-1"}]
CALLS = {"fn_name": "half", "inputs": [[3], [5]], "outputs": [1.5, 2.5]}
RIGHT = "print('expected-' + input())"
PROGRAMS = {
    "right": (RIGHT, 1.0, "ok"),
    "wrong": ("print('expected-0')", 0.0, "ok"),
    "raises": ("raise ValueError", 0.0, "ok"),
    "hangs": ("while True: pass", 0.0, "timeout"),
    "floods": ("while True: print('x' * 1000)", 0.0, "too_long"),
    "surrogate": ("x = '\ud800'", 0.0, "ok"),
    "breaks the sandbox": (f"# BREAK\n{RIGHT}", 0.0, "crashed"),
}


ENDED = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": ""}


def run(code: str, stdin: str, cpu_s: float) -> sandbox.Outcome:
    return sandbox.run_program(code.encode(), stdin.encode(), sandbox.JobLimits(cpu_s, 256, 4096))


def fusion(request: dict) -> dict:
    assert request["memory_limit_MB"] == 256
    outcome = run(request["code"], request["stdin"], request["run_timeout"])
    status = "TimeLimitExceeded" if outcome.ended in ("cpu", "wall") else "Finished"
    result = {"status": status, "return_code": outcome.code, "stdout": outcome.output.decode(), "stderr": ""}
    return {"status": "Success" if outcome.code == 0 else "Failed", "message": "", "run_result": result}


class Service(BaseHTTPRequestHandler):
    """Answers as the service does; fails on programs with the word BREAK, and on all while `down`."""

    seen: ClassVar[list[dict]] = []
    down = False

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen.append({"path": self.path, "key": self.headers["Authorization"], "body": body.decode()})
        failing = self.down or b"BREAK" in body
        self.send_response(500 if failing else 200)
        self.end_headers()
        self.wfile.write(b"no" if failing else json.dumps(fusion(json.loads(body))).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(Service, "seen", [])
    monkeypatch.setattr(Service, "down", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def rule_of(service: str, monkeypatch) -> Code:
    monkeypatch.setenv("SANDBOX_KEY", "key-1")
    limits = {"cpu_s": 0.3, "memory_mib": 256, "output_kib": 2}
    return Code(sandbox="sandbox-fusion", base_url=f"{service}/", api_key_env="SANDBOX_KEY", **limits)


def judged(rule: Code, code: str, tests: object = TESTS):
    return rule.score(Row(None, f"```python\n{code}\n```", None, {"tests": tests}))


def test_programs_are_judged_elsewhere_as_they_are_here(service, monkeypatch):
    rule = rule_of(service, monkeypatch)
    for name, (code, value, status) in PROGRAMS.items():
        verdict = judged(rule, code)
        assert (verdict.value, verdict.status) == (value, status), (name, verdict)
    assert judged(rule, "def half(x):\n    return x / 2", CALLS).value == 1.0
    assert judged(rule, "def half(x):\n    return 1.5", CALLS).value == 0.0


def test_expected_outputs_never_travel_and_the_key_only_in_its_header(service, monkeypatch):
    rule = rule_of(service, monkeypatch)
    assert judged(rule, RIGHT).value == 1.0
    assert [call["path"] for call in Service.seen] == ["/run_code"] * 2
    assert {call["key"] for call in Service.seen} == {"Bearer key-1"}
    assert not [call for call in Service.seen if SECRET in call["body"] or "key-1" in call["body"]]
    assert "key-1" not in repr(rule)


def test_a_service_that_is_down_gives_no_value(service, monkeypatch):
    rule = rule_of(service, monkeypatch)
    Service.down = True
    verdict = judged(rule, RIGHT)
    assert (verdict.value, verdict.status) == (None, "infra_error") and "HTTP 500" in verdict.detail
    away = rule_of("http://127.0.0.1:9", monkeypatch)
    assert judged(away, RIGHT).status == "infra_error"


def test_rows_of_a_batch_run_at_the_same_time(service, monkeypatch):
    together = threading.Barrier(4, timeout=30)
    monkeypatch.setattr(
        "test_code_remote.fusion",
        lambda request: together.wait() < 0 or {"status": "Failed", "run_result": ENDED},
    )
    rules = RuleSet([rule_of(service, monkeypatch)])
    texts = [f"```python\nprint({number})\n```" for number in range(4)]
    assert rules(completions=texts, tests=[TESTS] * 4) == [0.0] * 4
