"""What launched a run is written down without its secrets."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trl_ext.rewards.text.secrets import public
from trl_ext.trainers.record.launch import without_secrets

TOKEN = "hf_" + "aB3" * 8


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hub_token", "abc", "--seed", "1"], ["--hub_token", "...", "--seed", "1"]),
        (["--hub-token=abc"], ["--hub-token=..."]),
        (["--wandb_api_key", "abc"], ["--wandb_api_key", "..."]),
        (["--token", "--seed", "1"], ["--token", "--seed", "1"]),
        (["--pad_token", "<pad>", "--stop_token", "eos"], ["--pad_token", "<pad>", "--stop_token", "eos"]),
        (["--anything", TOKEN], ["--anything", "..."]),
        (["--url", "http://me:pass@host:80/x"], ["--url", "http://...@host:80/x"]),
        (["--url", "https://glpat0123@host/x?a=1&api_key=k&b=2"], ["--url", "https://...@host/x?a=1&api_key=...&b=2"]),
        (["--kw", '{"token": "abc", "a": {"api_key": "k"}, "b": 1}'], ["--kw", '{"a": {}, "b": 1}']),
        (["--kw", '{"token": "a b", "b": '], ["--kw", '{"token": "...", "b": ']),
        (["--rules", "[{rule: my.Asks, api_key: abc}]"], ["--rules", '[{"rule": "my.Asks"}]']),
        (["--prompt_template", "{question} [1]"], ["--prompt_template", "{question} [1]"]),
        (["--url", "https://host/x?sv=2024-01-01&n=12"], ["--url", "https://host/x?sv=...&n=12"]),
        (["--url", "https://host/x?download=true#frag=abcde"], ["--url", "https://host/x?download=true#frag=..."]),
        (["--env", "MY_SECRET=abc"], ["--env", "MY_SECRET=..."]),
        (["--header", "Authorization: Bearer abc"], ["--header", "Authorization: Bearer ..."]),
        (["--api_key_env", "MY_KEY"], ["--api_key_env", "MY_KEY"]),
        (["--max_tokens_per_forward", "8192"], ["--max_tokens_per_forward", "8192"]),
    ],
)
def test_a_command_line_loses_its_secrets_alone(words, shown):
    assert without_secrets(words) == shown


def test_data_loses_its_secrets_at_every_depth():
    given = {
        "hub_token": "x",
        "model_init_kwargs": {"token": "x", "dtype": "auto"},
        "env": {"HF_TOKEN": "x", "OPENAI_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_HOME": "/x"},
        "rules": [{"rule": "my.Judge", "api_key": "x", "eos_token": "<eos>"}, f"see {TOKEN}."],
        "push_to_hub": True,
    }
    given["env"] |= {"MY_WORD": "x", "NCCL_DEBUG": "INFO"}
    assert public(given) == {
        "model_init_kwargs": {"dtype": "auto"},
        "env": dict.fromkeys(given["env"]) | {"HF_HOME": "/x", "NCCL_DEBUG": "INFO"},
        "rules": [{"rule": "my.Judge", "eos_token": "<eos>"}, "see ...."],
        "push_to_hub": True,
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_line_is_the_launchers_where_there_is_one(tmp_path):
    ask = "from trl_ext.trainers.record.launch import launch_line; print(launch_line())"
    alone = subprocess.run([sys.executable, "-c", ask, "a b"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert alone.stdout.strip().endswith("'a b'")
    launcher = tmp_path / "accelerate"
    launcher.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])")
    argv = [sys.executable, str(launcher), "launch", "--num_processes", "2", "--hub_token", "x"]
    found = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert found.endswith("accelerate launch --num_processes 2 --hub_token ...")
