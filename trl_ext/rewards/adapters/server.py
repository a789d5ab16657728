"""A rule set behind HTTP, for trainers in other environments, languages or on other machines.

    POST /score       REQUEST below -> {"totals": [...], "rules": {"answer": {"values": [...], "statuses": [...]}}}
    POST /get_reward  OpenRLHF's remote reward: {"query": [...], "prompts": [...], "labels": [...]}
                      -> {"rewards": [...], "scores": [...], "extra_logs": {...}}
    GET /health       {"status": "ok"}

A total or a value is null where there is none. What cannot be judged is answered with 400 (the request), 413 (too
large), 415 (not JSON) or 500 (a rule) and {"error": "a sentence"}. There is no password: whoever reaches the port may
ask, and learns whether an answer is right. So it listens to this machine alone unless told otherwise, and asks for the
content type of JSON, which web pages of other origins cannot send unasked.
"""

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.rewards.adapters.openrlhf import OpenRLHFReward
from trl_ext.rewards.adapters.plain import check_stateless

# JSON Schema of the body of POST /score.
REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "prompts": {"type": "array", "description": "one per completion: a string or a list of messages"},
        "completions": {"type": "array", "description": "each a string or a list of messages"},
        "completion_ids": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "columns": {"type": "object", "additionalProperties": {"type": "array"}},
    },
    "required": ["completions"],
    "additionalProperties": False,
}
SILENT_S = 60.0  # A connection that sends nothing for so long is closed.
MAX_CONNECTIONS = 64


class RequestError(Exception):
    """A request that is answered with an error: its HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Serves a RuleSet until `shutdown()`.

    Args:
        rules: The RuleSet.
        host: Address to listen at; 127.0.0.1 is reached from this machine only.
        port: 0 takes a free one; `server_port` says which.
        max_body_bytes: Longest request that is read.

    Example:
        server = RewardServer(RuleSet.from_yaml("rules.yaml"), port=8300)
        server.serve_forever()
    """

    daemon_threads = True

    def __init__(self, rules: Any, host: str = "127.0.0.1", port: int = 8300, max_body_bytes: int = 2**24):
        check_stateless(rules, "a server")
        self.rules = rules
        self.max_body_bytes = max_body_bytes
        self.open_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Nothing can listen at {host} port {port}: {error}. Give another --port.") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Overrides socketserver.ThreadingMixIn.process_request: waits for a place among the open connections."""
        self.open_connections.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Overrides socketserver.ThreadingMixIn.process_request_thread: gives its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.open_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Overrides socketserver.BaseServer.handle_error: a client that goes away is nobody's fault."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The answer to a POST; RequestError for one that cannot be answered."""
        if path == "/score":
            return self._scored(_checked(body, REQUEST["properties"], REQUEST["required"]))
        if path == "/get_reward":
            wanted = {name: {"type": "array"} for name in ("query", "prompts", "labels")}
            body = _checked(body, wanted, list(wanted))
            reward = OpenRLHFReward(self.rules, as_lists=True)
            return reward(body["query"], body["prompts"], body["labels"])
        raise RequestError(404, f"There is no {path!r:.60}. POST to /score or /get_reward.")

    def _scored(self, body: Mapping[str, Any]) -> dict[str, Any]:
        found = self.rules.explain_all(
            body.get("prompts"), body["completions"], body.get("completion_ids"), **body.get("columns", {})
        )
        rules: dict[str, Any] = {rule.name: {"values": [], "statuses": []} for rule in self.rules.rules}
        for part in (part for one in found for part in one.parts):
            rules[part.rule]["values"].append(part.value)
            rules[part.rule]["statuses"].append(part.status)
        return {"totals": [one.total for one in found], "rules": rules}


_TYPES = {"array": list, "object": dict}


def _checked(body: Any, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """The body, or RequestError unless it is an object with these keys, and lists where they are due."""
    if not isinstance(body, dict):
        raise RequestError(400, f"The body is a {type(body).__name__}. Send a JSON object with {', '.join(required)}.")
    for name in required:
        if name not in body:
            raise RequestError(400, f"The body lacks '{name}'. There are: {', '.join(properties)}.")
    for name, value in body.items():
        if name not in properties:
            raise RequestError(400, f"The body has the unknown key {name!r:.60}. There are: {', '.join(properties)}.")
        kind = properties[name]["type"]
        if not isinstance(value, _TYPES[kind]):
            raise RequestError(400, f"'{name}' is a {type(value).__name__}. Send an {kind}.")
    columns = body.get("columns", {})
    wrong = next((name for name, cells in columns.items() if not isinstance(cells, list)), None)
    if wrong is not None:
        raise RequestError(400, f"The column {wrong!r:.60} is no array. Send one value per completion.")
    ids = body.get("completion_ids", [])
    if not all(isinstance(tokens, list) and all(type(token) is int for token in tokens) for tokens in ids):
        raise RequestError(400, "'completion_ids' holds something else than lists of integers. Send token ids.")
    taken = [name for name in ("prompts", "completions", "completion_ids") if name in columns]
    if taken:
        raise RequestError(400, f"'{taken[0]}' stands among the columns. Send it beside them.")
    return body


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "trl_ext", ""
    timeout = SILENT_S

    def do_GET(self) -> None:
        is_known = self.path == "/health"
        self._send(200 if is_known else 404, {"status": "ok"} if is_known else {"error": "There is only /health."})

    def do_POST(self) -> None:
        try:
            self._send(200, self.server.answer(self.path, self._body()))
        except RequestError as error:
            self._send(error.status, {"error": str(error)})
        except DataError as error:
            self._send(400, {"error": str(error)})
        except TrlExtError as error:
            self._send(500, {"error": str(error)})

    def _body(self) -> Any:
        self.close_connection = True  # Until the whole body is read, the next request cannot be found.
        if self.headers.get_content_type() != "application/json":
            raise RequestError(415, "The content type is not JSON. Send the header Content-Type: application/json.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise RequestError(411, "The request has no Content-Length. Send the body's length in bytes.")
        if int(length) > self.server.max_body_bytes:
            limit = self.server.max_body_bytes
            raise RequestError(
                413, f"The body has {length} bytes, more than {limit}. Send fewer completions at a time."
            )
        data = self.rfile.read(int(length))
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"The body is not JSON: {error}.") from error

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Overrides BaseHTTPRequestHandler.log_message: says nothing, since a training asks thousands of times."""
