"""Serve a rule set over HTTP, for trainers in other environments, languages or on other machines.

    POST /score   REQUEST below -> {"totals": [...], "rules": {"answer": {"values": [...], "statuses": [...]}}}
    POST /verify  NeMo-Gym's: {"responses_create_params": {...}, "response": {...}, ...columns}
                  -> {..., "reward": 1.0}; its /seed_session has no effect
    GET /health   {"status": "ok"}

A missing total or value is null. Errors are 400 (the request), 413 (too large), 415 (not JSON) or 500 (a rule), with
{"error": "a sentence"}. A client can find out right answers, so the server only listens on this machine. Web pages of
other origins cannot use it: they cannot send JSON's content type, and a page whose domain resolves to this machine
sends that domain as `Host` (403). Other machines need a token (`Authorization: Bearer TOKEN`, else 401).
"""

import hmac
import ipaddress
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from trl_ext.errors import ConfigError, DataError, RuleError, TrlExtError

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
SILENCE_S = 60.0  # A connection is closed if it sends nothing for longer.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class RequestError(Exception):
    """An error reply to a request: its HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Serves a RuleSet until `shutdown()`.

    Args:
        rules: The RuleSet.
        host: Address to listen at; only this machine reaches 127.0.0.1.
        port: 0 takes a free port, which is then `server_port`.
        max_body_bytes: Longest request that is read.
        token: Required in requests; needed if other machines reach `host`.

    Example:
        server = RewardServer(RuleSet.from_yaml("rules.yaml"), port=8300)
        server.serve_forever()
    """

    daemon_threads = True
    request_queue_size = 64  # With the standard five, the sixth waiting connection has to try again a second later.

    def __init__(
        self, rules: Any, host: str = "127.0.0.1", port: int = 8300, max_body_bytes: int = 2**24, token: str = ""
    ):
        if rules.normalise:
            raise RuleError(
                "normalise=True needs the totals of a whole run, and clients report none. Set it to False."
            )
        self.token = token.encode()
        self.rules = rules
        self.max_body_bytes = max_body_bytes
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Nothing can listen at {host} port {port}: {error}. Give another --port.") from error
        is_local = ipaddress.ip_address(str(self.server_address[0])).is_loopback
        self.names = {*LOCAL_NAMES, host.lower()} if is_local else None  # Elsewhere the token keeps pages out.
        if not is_local and not token:
            self.server_close()
            raise ConfigError(
                f"Other machines reach {host}, and whoever asks learns right answers. Give a token by --token_env "
                "(in Python: token=...), or listen at 127.0.0.1."
            )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Overrides socketserver.BaseServer.handle_error: ignores clients that disconnect."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """Return the answer to a POST; RequestError if there is no answer."""
        if path == "/score":
            return self._score(_checked(body, REQUEST["properties"], REQUEST["required"]))
        if path == "/seed_session":
            return {}
        if path == "/verify":
            return self._verify(body)
        raise RequestError(404, f"There is no {path!r:.60}. POST to /score or /verify.")

    def _score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        found = self.rules.explain_all(
            body.get("prompts"), body["completions"], body.get("completion_ids"), **body.get("columns", {})
        )
        rules: dict[str, Any] = {rule.name: {"values": [], "statuses": []} for rule in self.rules.rules}
        for part in (part for one in found for part in one.parts):
            rules[part.rule]["values"].append(part.value)
            rules[part.rule]["statuses"].append(part.status)
        return {"totals": [one.total for one in found], "rules": rules}

    def _verify(self, body: Any) -> dict[str, Any]:
        """Return NeMo-Gym's body with the total of its last message as `reward`, and the values of the rules."""
        try:
            columns = {name: [cell] for name, cell in body.items() if name not in _OF_NEMO_GYM}
            prompt = body["responses_create_params"]["input"]
            said = [item["content"] for item in body["response"]["output"] if item["type"] == "message"]
            completion = [{"role": "assistant", "content": said[-1] if said else ""}]
        except (LookupError, TypeError, AttributeError) as error:
            raise RequestError(400, f"The body is none of NeMo-Gym's /verify: {error!r:.60}.") from error
        asked = {"prompts": [prompt], "completions": [completion], "columns": columns}
        found = self._score(_checked(asked, REQUEST["properties"], REQUEST["required"]))
        if found["totals"] == [None]:
            raise RequestError(500, "No rule has a value for the completion.")
        values = {f"rules/{name}": rule["values"][0] for name, rule in found["rules"].items()}
        return {**body, **values, "reward": found["totals"][0]}


_OF_NEMO_GYM = ("responses_create_params", "response")
_TYPES = {"array": list, "object": dict}


def _checked(body: Any, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the body; RequestError unless it is an object with these keys and types."""
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
    if not all(isinstance(tokens, list) and {*map(type, tokens)} <= {int} for tokens in ids):
        raise RequestError(400, "'completion_ids' holds something else than lists of integers. Send token ids.")
    taken = [name for name in ("prompts", "completions", "completion_ids") if name in columns]
    if taken:
        raise RequestError(400, f"'{taken[0]}' is among the columns. Send it outside of them.")
    return body


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "trl_ext", ""
    timeout = SILENCE_S

    def do_GET(self) -> None:
        self._answer(self._health)

    def do_POST(self) -> None:
        self._answer(lambda: self.server.answer(self.path, self._body()))

    def _health(self) -> dict[str, str]:
        if self.path != "/health":
            raise RequestError(404, "There is only /health.")
        return {"status": "ok"}

    def _answer(self, ask: Callable[[], dict[str, Any]]) -> None:
        try:
            self._check_sender()
            self._send(200, ask())
        except RequestError as error:
            self._send(error.status, {"error": str(error)})
        except DataError as error:
            self._send(400, {"error": str(error)})
        except TrlExtError as error:
            self._send(500, {"error": str(error)})
        except (RecursionError, ValueError) as error:  # The body holds it, and /verify sends it back.
            self._send(400, {"error": f"No JSON answers it: {error}. Send a flatter body, and numbers without NaN."})

    def _check_sender(self) -> None:
        """Raise RequestError if the host name or the token is not this server's."""
        keeps_open, self.close_connection = not self.close_connection, True
        host = self.headers.get("Host", "")
        with suppress(ValueError):
            host = urlsplit(f"//{host}").hostname or ""
        if self.server.names is not None and host not in self.server.names:
            raise RequestError(403, f"The header Host names {host!r:.60}, not this server. Ask 127.0.0.1.")
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.server.token and not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise RequestError(401, "The token is missing or wrong. Send the header Authorization: Bearer TOKEN.")
        self.close_connection = not keeps_open

    def _body(self) -> Any:
        self.close_connection = True  # The next request begins only after the whole body.
        if self.headers.get_content_type() != "application/json":
            raise RequestError(415, "The content type is not JSON. Send the header Content-Type: application/json.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise RequestError(411, "The request has no Content-Length. Send the body's length in bytes.")
        if int(length) > self.server.max_body_bytes:
            limit = self.server.max_body_bytes
            raise RequestError(413, f"The body has {length} bytes, more than {limit}. Send fewer completions.")
        data = self.rfile.read(int(length))
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"The body is not JSON: {error}.") from error

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Overrides BaseHTTPRequestHandler.log_message: logs nothing, since a training sends thousands of requests."""
