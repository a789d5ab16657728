"""A stand-in for an OpenAI-compatible server, on 127.0.0.1, answering as a function says and noting what is asked."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # With five, a sixth connection waits for a second.

    def handle_error(self, request, client_address):
        """Print nothing: clients may hang up, as they do on a reply that is too long."""


class ChatServer:
    """Serves while it is entered.

    Args:
        answer: From the request to a reply's text, an HTTP code, a code with headers and perhaps a body,
            or the bytes of a whole body.
        together: Calls that must have been under way at a time before the first is answered, or five seconds over.
    """

    def __init__(self, answer: Callable[[dict], Any] = str, together: int = 1):
        self.now = 0  # calls under way
        self.answers(answer, together)
        self.lock = threading.Condition()
        self.server = Server(("127.0.0.1", 0), self.handler())

    def answers(self, answer: Callable[[dict], Any], together: int = 1) -> "ChatServer":
        """Answer so from now on, and forget what was asked before."""
        self.answer, self.together = answer, together
        self.requests: list[dict] = []
        self.headers: list[Any] = []
        self.most = 0
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def handler(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(request)
                    outer.headers.append(self.headers)
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                    outer.lock.notify_all()
                    outer.lock.wait_for(lambda: outer.most >= outer.together, timeout=5)
                code, headers, body = as_response(outer.answer(request))
                with outer.lock:
                    outer.now -= 1
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        return Handler


def as_response(answer: Any) -> tuple[int, dict[str, str], bytes]:
    """Code, headers and body of what `answer` returned."""
    if isinstance(answer, int):
        answer = (answer, {})
    if isinstance(answer, tuple):
        return (*answer, b'{"error": {"message": "no"}}')[:3]
    if isinstance(answer, bytes):
        return 200, {"Content-Type": "application/json"}, answer
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
    body = {"id": "1", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 7}}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def shown(request: dict) -> str:
    """What the judge was shown: the user's message."""
    return request["messages"][1]["content"]
