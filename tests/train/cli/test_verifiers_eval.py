"""verifiers' own evaluation asks `trl-ext score serve` for its rewards, from the file that the page shows."""

import json
import os
import subprocess
import threading
import tomllib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.chat_server import Server
from tests.documents import BLOCKS
from tests.other_python import python_with
from trl_ext import RuleSet
from trl_ext.rewards import Answer
from trl_ext.rewards.adapters.server import RewardServer

PAGE = "docs/running/environments.md"
CHUNK = {"id": "1", "created": 1, "model": "policy", "object": "chat.completion.chunk"}


class Says18(BaseHTTPRequestHandler):
    """A model whose answer is always 18, streamed."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choices = [
            {"index": 0, "delta": {"role": "assistant", "content": "The answer is 18"}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        events = [{**CHUNK, "choices": [choice]} for choice in choices] + [{**CHUNK, "choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(f"data: {one}\n\n" for one in [*map(json.dumps, events), "[DONE]"]).encode())

    def log_message(self, *args: object) -> None:
        pass


def serve(server: Server | RewardServer) -> str:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.nightly
def test_verifiers_own_taskset_is_scored_by_rules(tmp_path):
    python = python_with(["verifiers==0.4.*", "uv"], "TRL_EXT_VERIFIERS_PYTHON", tmp_path / "venv")
    (block,) = [b for b in BLOCKS if b.page == PAGE and b.language == "toml"]
    asked = [{"role": "user", "content": "9 * 2 ="}]
    rows = [{"responses_create_params": {"input": asked}, "answer": gold} for gold in ("18", "27")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, rules = Server(("127.0.0.1", 0), Says18), RewardServer(RuleSet([Answer(gold="answer")]), port=0)
    with model, rules:
        of_model, of_rules = serve(model), serve(rules)
        text = block.text.replace("http://127.0.0.1:8300", of_rules).replace("http://127.0.0.1:8000", of_model)
        assert "nemo_gym" in tomllib.loads(text)["env"]["taskset"]["id"]
        (tmp_path / "eval.toml").write_text(text)
        service = {"PRIME_API_KEY": "none", "PRIME_INFERENCE_URL": f"{of_model}/v1"}
        # verifiers runs its chat program by `uv`, and fetches it from the network where the path has none.
        service["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        done = subprocess.run(
            [str(Path(python).parent / "vf-eval"), "@", "eval.toml"],
            cwd=tmp_path,
            env=os.environ | service,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (traces,) = tmp_path.glob("outputs/*/traces.jsonl")
    found = [json.loads(line)["traces"][0] for line in traces.read_text().splitlines()]
    earned = {trace["info"]["nemo_gym"]["answer"]: trace["rewards"]["nemo_gym"]["score"] for trace in found}
    assert earned == {"18": 1.0, "27": 0.0}
