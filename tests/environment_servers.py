"""Stand-ins for servers of environments: NeMo-Gym's dialect on 127.0.0.1, and a client as those of OpenEnv.

Both play one game: a session has a goal, `add` adds to its total and is paid 0.25 for two numbers that differ, and
its end is scored by how near the total came.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from tests.chat_server import Server

NUMBER = {"type": "integer", "description": "A number."}
ADD = {"type": "object", "title": "AddRequest", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}


def posts(schema: dict | None = None, **more: Any) -> dict:
    """An address in the page that FastAPI writes of itself."""
    body = {} if schema is None else {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    return {"post": {"summary": "Add", **body, **more}}


PAGE = {
    "paths": {
        "/seed_session": posts({"type": "object"}),
        "/add": posts({"$ref": "#/components/schemas/AddRequest"}, description="Add two numbers.\n\nTo the total."),
        "/count": posts(),
        "/verify": posts({"type": "object"}),
        "/aggregate_metrics": posts({"type": "object"}),
        "/files/{name}": posts(),
        "/openapi": {"get": {}},
    },
    "components": {"schemas": {"AddRequest": ADD}},
}


class Game:
    """A session's state, wherever it is played."""

    def __init__(self, goal: int):
        self.goal, self.total, self.earned = goal, 0, 0.0

    def add(self, a: int, b: int) -> float:
        self.total += a + b
        self.earned += 0.25 * (a != b)
        return 0.25 * (a != b)

    def score(self) -> float:
        return 1 / (1 + abs(self.total - self.goal))


class GymServer:
    """Serves while it is entered.

    Args:
        answer: From the path and the number of requests of the session, this one included, to what is sent instead:
            bytes as they are, an HTTP code, seconds to wait, a function that writes to the connection; None: what the
            game says.

    Attributes:
        asked: Path, body and headers of each request.
        sessions: Games by the value of their cookie.
    """

    def __init__(self, answer: Callable[[str, int], Any] = lambda path, number: None):
        self.answer, self.asked, self.sessions, self.counts = answer, [], {}, {}
        self.server = Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "GymServer":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def play(self, path: str, body: dict, session: str) -> tuple[int, Any]:
        if path == "/seed_session":
            self.sessions[session] = Game(body["level"] * 2)
            return 200, {}
        game = self.sessions[session]
        if path == "/add" and not all(type(body.get(key)) is int for key in "ab"):
            return 422, {"detail": "a and b have to be integers"}
        if path == "/add":
            reward = game.add(body["a"], body["b"])
            return 200, game.total if body["a"] < 60 else {"total": game.total, "reward": reward}
        if path == "/count":
            return 200, {"total": game.total, "reward": 0.125}
        return 200, {**body, "reward": game.score()}

    def _handler(self) -> Any:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps(PAGE).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body, dict(self.headers)))
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get("session")
                session = cookie.value if cookie else uuid.uuid4().hex
                outer.counts[session] = outer.counts.get(session, 0) + 1
                other = outer.answer(self.path, outer.counts[session])
                if isinstance(other, float):
                    time.sleep(other)
                if callable(other):
                    other(self.wfile)
                elif isinstance(other, bytes):
                    self.reply(200, other)
                elif isinstance(other, int):
                    self.reply(other, b"<html>no</html>")
                else:
                    code, found = outer.play(self.path, body, session)
                    self.reply(code, json.dumps(found).encode(), session)

            def reply(self, code: int, data: bytes, session: str = "") -> None:
                self.send_response(code)
                if session:
                    self.send_header("Set-Cookie", f"session={session}; Path=/; HttpOnly; SameSite=lax")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


class Result:
    """What OpenEnv's clients return."""

    def __init__(self, observation: Any, reward: float | None = None, done: bool = False):
        self.observation, self.reward, self.done = observation, reward, done


class EnvClient:
    """As a client of an OpenEnv package, with the game in the place of a server; `open` holds those not closed."""

    open: ClassVar[set[int]] = set()

    def __init__(self, base_url: str, connect_timeout_s: float, message_timeout_s: float, max_message_size_mb: float):
        self.base_url = base_url

    def sync(self) -> "EnvClient":
        return self

    def reset(self, level: int) -> Result:
        EnvClient.open.add(id(self))
        self.game = Game(2 * level)
        return Result(f"{level} + {level} =")

    def step(self, action: dict) -> Result:
        reward = self.game.add(**action)
        return Result(str(self.game.total), reward, done=self.game.total == self.game.goal)

    def close(self) -> None:
        EnvClient.open.discard(id(self))
