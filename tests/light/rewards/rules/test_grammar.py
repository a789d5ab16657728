"""Grammar: seven signs of fluent prose, or the complaints of a LanguageTool server."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row, Verdict
from trl_ext.rewards.rules.grammar import Grammar, complaints_in

GOOD_ENGLISH = (
    "Let me think about this (briefly). The ducks lay 16 eggs a day, of which Janet eats three!\n\n"
    "- first, she bakes four\n- then she sells the rest\n\n"
    "So she makes $9 \\cdot 2 = 18$ dollars. In code that is `print(9 * 2)`, and the answer is:\n```\nprint(18\n```"
)
GOOD_CHINESE = (
    "我们先算出鸡蛋的总数。她每天吃三个（早餐），再用四个烤蛋糕，所以还剩九个！\n答案是 $9 \\times 2 = 18$ 美元。"
)


def judged(text: str, **fields) -> Verdict:
    return Grammar(**fields).score(Row(None, text, None, {}))


@pytest.mark.parametrize("text", [GOOD_ENGLISH, GOOD_CHINESE])
def test_good_prose_around_code_and_formulas_earns_one(text):
    assert judged(text) == Verdict(1.0, "ok", "all signs good")


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("the answer is 18.", "starts"),
        ("The answer is 18. so it is.", "starts"),
        ("The answer is\n\nSo eggs are what", "ends"),
        ("所以一共还剩九个鸡蛋", "ends"),
        ("The answer (in dollars is 18.", "balance"),
        ("The answer) is (18.", "balance"),
        ('He said "18.', "balance"),
        ("答案「十八」」很清楚。", "balance"),
        ("The answer xkcdq is 18.", "words"),
        ("The answer is a1b2c3.", "words"),
        ("The answer is heeeeey.", "words"),
        ("The answer \ud800 is 18.", "words"),
        ("The answer is 18!!", "punctuation"),
        ("答案是十八。。", "punctuation"),
        ("The answer is.. 18.", "punctuation"),
        ("The the answer is 18.", "doubled"),
        ("The answer , they say, is 18.", "spacing"),
    ],
)
def test_each_defect_lowers_its_own_sign_and_no_other(text, sign):
    verdict = judged(text)
    assert verdict.value < 1.0
    assert [part.split()[0] for part in verdict.detail.split(", ")] == [sign]


@pytest.mark.parametrize(
    "text",
    [
        "He had had enough of that that.",
        "Wait... is it $x$?",
        "1) First, add them.\n2) Then halve them.",
        "GPT4 runs on the H100 at NASA.",
        "A wrapped line goes on\nwith a small letter.",
        "慢慢来，好好学习。",
        "It costs $5 and not $6.",
        "# Heading without a full stop\nThe text has one.",
        "Вопрос решён: ответ равен восемнадцати.",
    ],
)
def test_what_is_right_is_no_defect(text):
    assert judged(text).value == 1.0


@pytest.mark.parametrize("text", ["", "...", "$x = 18$", "```\nprint(18)\n```", "((((", "\u200b", "😀"])
def test_a_text_without_words_earns_the_floor(text):
    verdict = judged(text)
    assert (verdict.value, verdict.status) == (0.0, "no_answer")


@pytest.mark.parametrize("added", [" ()", ' "18"', "\n- list", "\n\n# Heading", " [x]", "; yes"])
def test_something_good_where_there_was_nothing_does_not_raise_the_value(added):
    text = "the the answer is 18"
    assert judged(text + added).value <= judged(text).value


def test_after_think_reads_the_answer_alone():
    text = "<think>hm the the xkcdq</think>The answer is 18."
    assert judged(text).value < judged(text, where="after_think").value == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"where": "think"},
        {"timeout_s": 0},
        {"server": "file:///etc/passwd"},
        {"server": "localhost:8081"},
        {"server": "http://"},
        {"server": "http://[::1"},
        {"server": 8081},
    ],
)
def test_fields_that_cannot_work_are_refused(fields):
    with pytest.raises(RuleError, match="grammar"):
        Grammar(**fields)


def test_only_the_server_needs_a_worker():
    assert (Grammar().tier, Grammar(server="http://localhost:8081").tier) == ("inline", "worker")


# A server ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(code: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()):
    """The address of a server that gives one answer to all, and the forms that it got."""
    forms: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            forms.append(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.send_response(code)
            for header in headers:
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", forms
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_servers_complaints_lower_the_value():
    body = json.dumps({"matches": [{"message": "a"}]}).encode()
    with serving(200, body) as (address, forms):
        verdict = judged("One two three four five six seven eight nine ten, " * 2 + "`code` \ud800", server=address)
    assert (verdict.value, verdict.detail) == (0.5, "1 complaints in 20 words")
    assert forms == [
        {"text": ["One two three four five six seven eight nine ten, " * 2 + "  ?"], "language": ["auto"]}
    ]


@pytest.mark.parametrize(
    ("code", "body", "headers", "detail"),
    [
        (200, b"[]", (), "no list of matches"),
        (200, b"\xff", (), "decode"),
        (200, b"not json", (), "Expecting value"),
        (200, b"[" * 100_000, (), "nested too deeply"),
        (200, b'{"matches": 3}', (), "no list of matches"),
        (200, b" " * 4_000_001, (), "longer than"),
        (302, b"", (("Location", "file:///etc/passwd"),), "answered 302"),
        (500, b"", (), "answered 500"),
        (200, b"{}", (("Content-Length", "100"),), "no list of matches"),
    ],
)
def test_a_reply_that_is_none_is_a_fault_of_the_machine(code, body, headers, detail):
    with serving(code, body, headers) as (address, _):
        verdict = judged("The answer is 18.", server=address)
    assert (verdict.value, verdict.status) == (None, "infra_error")
    assert detail in verdict.detail


def test_a_server_that_is_away_is_a_fault_of_the_machine():
    with serving(200, b"") as (address, _):
        pass
    assert judged("The answer is 18.", server=address).status == "infra_error"


def test_a_text_that_the_server_finds_too_long_is_the_completions_fault():
    with serving(413, b"") as (address, _):
        verdict = judged("The answer is 18.", server=address)
    assert (verdict.value, verdict.status) == (0.0, "too_long")


def test_the_server_gets_the_head_of_a_long_text():
    with serving(200, b'{"matches": []}') as (address, forms):
        assert judged("word " * 20_000, server=address).detail == "0 complaints in 4000 words"
    assert len(forms[0]["text"][0]) == 20_000


def test_a_silent_server_is_given_up_in_time():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:  # Listens and never accepts.
        verdict = judged("The answer is 18.", server=f"http://127.0.0.1:{silent.server_port}", timeout_s=0.05)
    assert verdict.status == "infra_error" and "timed out" in verdict.detail


def test_matches_are_counted_and_not_read():
    assert complaints_in(b'{"matches": [null, {}, "x"]}') == 3
