"""What `--vllm_servers N` makes of a command line: servers, their cards, and what the run is told of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from trl import TrlParser
from trl.scripts import vllm_serve

from tests import fake_servers
from trl_ext import GRPOConfig
from trl_ext.compat.vllm import STARTS_VARIABLE, starts
from trl_ext.errors import ConfigError, SupportError
from trl_ext.launch import servers
from trl_ext.launch.servers import servers_beside, serving
from trl_ext.scripts.grpo import make_parser
from trl_ext.trainers.settings.values import check_settings

RUN = ["--model_name_or_path", "Qwen/Qwen2.5-7B", "--output_dir"]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Ask for servers on a machine with so many cards."""

    def ask(*words, cards=8, trainer="grpo"):
        monkeypatch.setattr(servers, "_visible_cards", lambda: [str(card) for card in range(cards)])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        return servers_beside(trainer, make_parser(), [*RUN, str(tmp_path / "out"), *words])

    return ask


def test_the_last_cards_serve_and_without_the_flag_nothing_changes(asked, tmp_path):
    assert asked("--beta", "0.1") == (None, [*RUN, str(tmp_path / "out"), "--beta", "0.1"])
    found, _ = asked("--vllm_servers", "2", "--vllm_tensor_parallel_size", "2")
    assert found.cards == ("4,5", "6,7") and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_the_run_is_told_where_the_servers_are(asked):
    found, words = asked("--vllm_servers=2")
    told = make_parser().given_values(words)
    assert told["vllm_server_base_url"].split(",") == list(found.urls) and len(set(found.urls)) == 2
    assert (told["use_vllm"], told["vllm_mode"]) == (True, "server")
    assert f":{told['vllm_group_port']}" not in told["vllm_server_base_url"]


def test_trl_takes_the_command_of_each_server(asked):
    lengths = "--vllm_max_model_length 1024 --vllm_gpu_memory_utilization 0.7 --trust_remote_code true".split()
    found, _ = asked("--vllm_servers", "2", "--vllm_tensor_parallel_size", "2", "--model_revision", "v1", *lengths)
    for number, command in enumerate(found.commands):
        options, rest = TrlParser(vllm_serve.ScriptArguments).parse_args_and_config(
            list(command[2:]), return_remaining_strings=True
        )
        assert (options.model, options.revision, options.host) == ("Qwen/Qwen2.5-7B", "v1", "127.0.0.1")
        assert (options.tensor_parallel_size, options.max_model_len) == (2, 1024)
        assert (options.gpu_memory_utilization, options.trust_remote_code) == (0.7, True)
        assert rest == (["--seed", str(number)] if number else [])


OPTIONS = {
    "kv_cache_dtype": "fp8",
    "enable-prefix-caching": False,
    "enable_expert_parallel": True,
    "max_num_seqs": 64,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    "reasoning_parser": "--port=1; echo $HOME `ls`",  # a text that no shell and no parser takes apart
}


@pytest.mark.parametrize("is_flag", [False, True])
def test_options_of_vllm_reach_its_command_as_words(asked, is_flag, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"vllm_server_options": OPTIONS}))
    given = ["--vllm_server_options", json.dumps(OPTIONS)] if is_flag else ["--config", str(tmp_path / "recipe.yaml")]
    found, words = asked("--vllm_servers", "1", *given)
    options, rest = TrlParser(vllm_serve.ScriptArguments).parse_args_and_config(
        list(found.commands[0][2:]), return_remaining_strings=True
    )
    command = vllm_serve.build_command(options, rest)
    asks = dict(zip(command, [*command[1:], ""], strict=True))
    assert (
        asks["--kv-cache-dtype"] == "fp8" and json.loads(asks["--speculative-config"]) == OPTIONS["speculative_config"]
    )
    assert rest == [
        "--no-enable-prefix-caching",
        "--enable-expert-parallel",
        "--max-num-seqs=64",
        f"--reasoning-parser={OPTIONS['reasoning_parser']}",
    ]
    assert asks["--port"] == found.urls[0].rpartition(":")[2]
    assert make_parser().given_values(words)["vllm_server_options"]  # the run is recorded with them


def test_servers_start_with_options(of_stand_ins, tmp_path):
    with serving(of_stand_ins("--vllm_server_options", '{"kv_cache_dtype": "fp8"}')):
        pids = [line["pid"] for line in fake_servers.noted(tmp_path / "bin")]
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 1}, "vllm_server_options has 'port': 1. Write options of `vllm serve` without"),
        ({"tensor-parallel-size": 2}, "vllm_server_options has 'tensor-parallel-size': 2"),
        ({"--kv-cache-dtype": "fp8"}, "vllm_server_options has '--kv-cache-dtype': 'fp8'"),
        ({"kv_cache_dtype": None}, "vllm_server_options has 'kv_cache_dtype': None"),
        ({"kv_cache_dtype; rm": "x"}, "vllm_server_options has 'kv_cache_dtype; rm'"),
        ("--kv-cache-dtype fp8", "vllm_server_options='--kv-cache-dtype fp8' must be a mapping"),
        ("[1]", r"vllm_server_options='\[1\]' must be a mapping"),
    ],
)
def test_options_that_vllm_may_not_be_given_are_a_sentence(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(str(tmp_path), use_cpu=True, use_vllm=True, vllm_server_options=options)


def test_options_for_servers_that_nobody_starts_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(STARTS_VARIABLE, raising=False)
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_server_options={"kv_cache_dtype": "fp8"}
    )
    with pytest.raises(ConfigError, match=r"is for servers that trl-ext starts\. Launch with --vllm_servers N"):
        check_settings(args)
    monkeypatch.setenv(STARTS_VARIABLE, str(tmp_path / "starts.json"))
    check_settings(args)
    with pytest.raises(ConfigError, match="has no effect without use_vllm=True"):
        check_settings(
            GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_options={"kv_cache_dtype": "fp8"})
        )


REFUSED = {
    "--vllm_servers 0": "--vllm_servers is '0'",
    "--vllm_servers two": "--vllm_servers is 'two'",
    "--vllm_servers": "--vllm_servers is ''",
    "--vllm_servers 1 --vllm_servers 2": "once",
    "--vllm_servers 8": "needs 8 GPUs, and 8 are visible: none is left for training",
    "--vllm_servers 2 --vllm_tensor_parallel_size 4": "needs 8 GPUs",
    "--vllm_servers 1 --use_vllm false": "use_vllm is False",
    "--vllm_servers 1 --vllm_mode colocate": "vllm_mode is colocate",
    "--vllm_servers 1 --vllm_server_port 8000": "vllm_server_port is 8000",
    "--vllm_servers 1 --num_machines 2": "this machine only",
}


def test_what_cannot_be_is_a_sentence(asked):
    for words, sentence in REFUSED.items():
        with pytest.raises(ConfigError, match=sentence):
            asked(*words.split())
    with pytest.raises(ConfigError, match="generates nothing"):
        asked("--vllm_servers", "1", trainer="reward")
    with pytest.raises(ConfigError, match=r"There is no model\. Give --model_name_or_path"):
        servers_beside("grpo", make_parser(), ["--vllm_servers", "1"])


def test_without_trl_on_the_path_it_says_so(asked, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *names, **options: None)
    with pytest.raises(SupportError, match="there is no program trl"):
        asked("--vllm_servers", "1")


@pytest.fixture
def of_stand_ins(asked, tmp_path, monkeypatch):
    """Servers of the stand-in, on the CPU."""
    for name, value in fake_servers.put_on_path(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    return lambda *words: asked("--vllm_servers", "2", *words, cards=0)[0]


def test_a_server_that_does_not_answer_in_time_is_a_sentence(of_stand_ins, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TRL", "deaf")
    with (
        pytest.raises(ConfigError, match=r"server 1 of 2 does not answer after 1 s.*--vllm_server_timeout"),
        serving(of_stand_ins("--vllm_server_timeout", "1")),
    ):
        pytest.fail("the block may not begin")
    assert not [line for line in fake_servers.noted(tmp_path / "bin") if psutil.pid_exists(line["pid"])]


def test_a_server_that_hangs_while_samples_are_ahead_is_started_again(of_stand_ins, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "HANGING_S", 1.0)
    with serving(of_stand_ins("--generation_ahead", "1")):
        first = next(line["pid"] for line in fake_servers.noted(tmp_path / "bin") if "pid" in line)
        os.kill(first, signal.SIGSTOP)
        until_s = time.monotonic() + 60
        while starts() == "[1, 1]":
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert not psutil.pid_exists(first)


def test_an_error_in_the_run_ends_the_servers(of_stand_ins):
    with pytest.raises(KeyError), serving(of_stand_ins()):
        pids = set(servers.running)
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        raise KeyError
    assert not any(map(psutil.pid_exists, pids)) and not servers.running


STARTS = """
import sys
from trl_ext.launch.servers import running, serving, Serving
from pathlib import Path
with serving(Serving(({command!r},), ("",), ({url!r},), (Path({log!r}),), 60.0)):
    print(*running, flush=True)
    sys.stdin.read()
"""


def test_servers_end_with_a_launcher_that_is_killed(of_stand_ins):
    one = of_stand_ins()
    program = STARTS.format(command=one.commands[0], url=one.urls[0], log=str(one.logs[0]))
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as launcher:
        launcher.stdout.readline()
        server = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until_s = time.monotonic() + 30
    while psutil.pid_exists(server) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)
