"""A stand-in for LanguageTool's server, on 127.0.0.1, answering as a function says and noting what is asked."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from tests.chat_server import Server

LANGUAGES = ("de-DE", "zh-CN", "zh")


class LanguageToolServer:
    """Serves while it is entered; finds nothing, unless a test says otherwise."""

    def __init__(self):
        self.answers(lambda text: b'{"matches": []}')

    def answers(self, answer: Callable[[str], Any]) -> "LanguageToolServer":
        """From now on reply to a text with the body that the function returns, or its HTTP code."""
        self.answer = answer
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        return self

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                outer.asked.append((self.path, form))
                said = outer.answer(form["text"][0]) if form["language"][0] in LANGUAGES else 400
                self.send_response(said if isinstance(said, int) else 200)
                self.end_headers()
                self.wfile.write(b"" if isinstance(said, int) else said)

            def log_message(self, *args):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
