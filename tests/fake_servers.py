"""Stands in for vLLM servers and for what TRL's client needs of vLLM: no machine without cards can run them.

The servers are programs of their own, `tests/multi/programs/fake_trl.py`; this is the client's side. What the trainer
broadcasts is noted and goes nowhere. As a reward function, `length`, it comes into a launched trainer, too.
"""

import json
import os
from pathlib import Path

from trl import import_utils

from tests.conftest import ROOT

PROGRAM = ROOT / "tests" / "multi" / "programs" / "fake_trl.py"
LOG = "FAKE_TRL_LOG"


def put_on_path(folder: Path) -> dict[str, str]:
    """Make `trl` in the folder the stand-in, beside an empty vLLM; what to set in the environment for it."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    (folder / "trl").symlink_to(PROGRAM)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", LOG: str(folder / "requests.jsonl")}


def noted(folder: Path) -> list[dict]:
    """What the servers, and the trainer that broadcasts, have noted."""
    log = folder / "requests.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def requests(lines: list[dict], path: str) -> list[dict]:
    return [line for line in lines if line.get("path") == path]


def _note(**line: object) -> None:
    with open(os.environ[LOG], "a") as log:
        log.write(json.dumps(line) + "\n")


def _broadcast(iterator, group, src, post_iter_func):
    _note(path="broadcast", names=[name for name, _ in iterator], group=group, src=src)


def install() -> None:
    """Let TRL's client find vLLM, and a card where there is none."""
    import_utils.is_vllm_available = lambda *names, **versions: False  # while modules would import it
    from trl.generation import vllm_client, vllm_generation

    join = vllm_client.VLLMClient.init_communicator
    stand_ins = {
        "is_vllm_available": lambda *names, **versions: True,
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
        "get_ip": lambda: "127.0.0.1",
        "open_trainer_endpoint": lambda info: {**info, "rank": 0},
        "packed_nccl_broadcast_producer": _broadcast,
    }
    for name, stand_in in stand_ins.items():
        setattr(vllm_client, name, stand_in)
    vllm_generation.is_vllm_available = stand_ins["is_vllm_available"]
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: join(self, "cuda")
    vllm_client.VLLMClient.close_communicator = lambda self: None


def length(completions, **columns):
    """A reward that differs between completions."""
    return [float(number % 3) for number, _ in enumerate(completions)]


if os.environ.get("FAKE_TRL_CLIENT"):
    install()
