"""The page's block for an OpenEnv server, as printed, against a server of OpenEnv's own."""

import os
import subprocess

import pytest

from tests.documents import BLOCKS, ROOT
from tests.other_python import python_with

SERVER = """
import socket, threading, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    message: str

class Seen(Observation):
    text: str = ""

class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **_):
        return Seen(text=f"seed {seed}")

    def step(self, action, **_):
        is_right = action.message == "crane"
        return Seen(text=action.message, reward=float(is_right), done=is_right)

free = socket.create_server(("127.0.0.1", 0))
app = create_app(Words, Guess, Seen, max_concurrent_envs=2)
server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
threading.Thread(target=server.run, kwargs={"sockets": [free]}, daemon=True).start()
while not server.started:
    time.sleep(0.05)
url = f"http://127.0.0.1:{free.getsockname()[1]}"
"""
PLAY = """
played = environment()
assert "seed 3" in played.reset(prompt="a word", seed=3)
assert [played.guess(message="audio"), played.guess(message="crane")] == ['{"text": "audio"}', '{"text": "crane"}']
assert (played.earned, played.lost) == ([0.0, 1.0], "")
assert "ended" in played.guess(message="again")
played._close()
"""


@pytest.mark.nightly
def test_the_printed_block_plays_an_episode(tmp_path):
    python = python_with(["openenv==0.10.*"], "TRL_EXT_OTHER_PYTHON", tmp_path / "venv")
    page = "docs/running/environments.md"
    (block,) = [b for b in BLOCKS if b.page == page and "GenericEnvClient" in b.text]
    printed = block.text.replace('"http://127.0.0.1:8001"', "url")
    assert printed != block.text
    (tmp_path / "play.py").write_text(SERVER + printed + PLAY)
    done = subprocess.run([python, str(tmp_path / "play.py")], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
