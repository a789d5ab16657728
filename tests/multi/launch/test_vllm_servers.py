"""`trl-ext grpo --vllm_servers 2`: servers start, generate, get every weight, end with the run, however it ends."""

import json
import os
import time

import psutil
import pytest

from tests import fake_servers, tiny
from tests.multi.launching import TIMEOUT_S, ended
from tests.multi.warm import warm_python
from tests.reward_trainers import chat_tokenizer

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    tiny.model("llama").save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": [{"role": "user", "content": f"Calculate: {number} + 3 = ?"}]} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def launched(folder, tmp_path, *options, **variables):
    """A launch of two processes and two servers; the finished process, and what the servers noted."""
    given = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "rows.jsonl",
        "output_dir": tmp_path / "out",
    }
    given |= {"reward_funcs": "tests.fake_servers.length", "max_steps": STEPS, "num_generations": 2}
    given |= {"per_device_train_batch_size": 4, "max_completion_length": 4, "use_cpu": True, "bf16": False}
    given |= {"report_to": "none", "save_strategy": "no", "vllm_tensor_parallel_size": 2}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    launch = ["--config_file", "multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--vllm_servers", "2"]
    bin_folder = tmp_path / "bin"
    variables = fake_servers.put_on_path(bin_folder) | variables
    command = [warm_python(), "-m", "trl_ext.cli.main", "grpo", *launch, *words, *options]
    done = ended(command, bin_folder, FAKE_TRL_CLIENT=1, **variables)
    return done, fake_servers.noted(bin_folder)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    done, lines = launched(folder, tmp_path_factory.mktemp("run"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return lines


def servers(lines):
    return [line for line in lines if "pid" in line]


def test_each_server_listens_on_this_machine_alone_with_the_runs_model_and_a_seed_of_its_own(run, folder):
    assert {line["host"] for line in servers(run)} == {"127.0.0.1"}
    seeds = [line["seed"] for line in servers(run)]
    assert sorted(seeds, key=str) == [1, None]  # servers note themselves as soon as they have started, in any order
    assert {line["model"] for line in servers(run)} == {str(folder / "model")}
    assert {line["tensor_parallel_size"] for line in servers(run)} == {2}
    assert {line["gpu_memory_utilization"] for line in servers(run)} == {0.9}


def test_servers_share_the_prompts_of_each_generation(run):
    asked = fake_servers.requests(run, "/v1/completions")
    assert [len(line["body"]["prompt"]) for line in asked] == [2, 2] * STEPS
    assert {line["port"] for line in asked} == {line["port"] for line in servers(run)}


def test_workers_of_all_servers_join_one_group(run):
    joined = fake_servers.requests(run, "/init_weight_transfer_engine")
    infos = {line["port"]: line["body"]["init_info"] for line in joined}
    assert sorted(info["rank_offset"] for info in infos.values()) == [1, 3]
    assert {info["world_size"] for info in infos.values()} == {5}


def test_every_weight_is_announced_to_all_servers_and_broadcast_once(run):
    announced, sent = (fake_servers.requests(run, path) for path in ("/update_weights", "broadcast"))
    assert len(announced) == 2 * len(sent) >= 2 * STEPS
    names = [line["body"]["update_info"]["names"] for line in announced]
    assert sorted(map(tuple, names)) == sorted(tuple(line["names"]) for line in sent for _ in range(2))
    assert {name for line in sent for name in line["names"]} == {
        name for name, _ in tiny.model("llama").named_parameters()
    }


def test_the_servers_end_with_the_run(run):
    assert not [line for line in servers(run) if psutil.pid_exists(line["pid"])]


def test_a_server_that_does_not_start_is_a_sentence_before_anything_trains(folder, tmp_path):
    done, lines = launched(folder, tmp_path, FAKE_TRL="dies")
    assert done.returncode == 2
    assert "(exit code 1) has not started: 'No available memory for the cache blocks.'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [line for line in servers(lines) if psutil.pid_exists(line["pid"])]


def test_a_server_that_dies_ends_the_run_with_a_sentence(folder, tmp_path):
    began = time.monotonic()
    done, lines = launched(folder, tmp_path, FAKE_TRL="dies_later")
    assert done.returncode == 6
    assert "has ended, and the run with it: 'CUDA error: an illegal memory access was encountered'" in done.stderr
    assert "--resume_from_checkpoint true" in done.stderr
    assert not [line for line in servers(lines) if psutil.pid_exists(line["pid"])]
    mine = {child.pid for child in psutil.Process().children(True)}
    lines = [p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"]) if p.pid in mine]
    assert not [line for line in lines if "trl_ext.scripts.grpo" in line]
    assert time.monotonic() - began < TIMEOUT_S and os.path.isdir(tmp_path / "out" / "vllm")


AHEAD = ("--generation_ahead", "1", "--max_steps", "4")


@pytest.mark.parametrize(
    "fate",
    [
        "once:/v1/completions:3",
        pytest.param("after:/v1/completions:3", marks=pytest.mark.nightly),
        pytest.param("once:/update_weights:2", marks=pytest.mark.nightly),
    ],
)
def test_a_server_that_dies_while_samples_are_ahead_is_started_again(fate, folder, tmp_path):
    done, lines = launched(folder, tmp_path, *AHEAD, FAKE_TRL=fate)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    ports = [line["port"] for line in servers(lines)]
    assert len(ports) == 3 and len(set(ports)) == 2
    assert "A vLLM server was lost by step" in done.stderr
    joined = fake_servers.requests(lines, "/init_weight_transfer_engine")
    assert len(joined) == 4  # both servers, again


def test_after_three_restarts_the_run_ends_with_the_servers_last_words(folder, tmp_path):
    done, _ = launched(folder, tmp_path, *AHEAD, FAKE_TRL="dies_later")
    assert done.returncode == 6
    assert "has ended, and the run with it: 'CUDA error: an illegal memory access was encountered'" in done.stderr
    assert sum(json.loads((tmp_path / "out" / "vllm" / "starts.json").read_text())) == 2 + 3
