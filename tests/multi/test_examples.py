"""Each script of `examples/` runs as a user starts it, with a tiny model, for one step.

The working folder has rows under the names that the scripts ask the hub for.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trl

from tests import fake_servers, tiny
from tests.conftest import ROOT
from tests.multi.launching import environment, succeeded
from tests.multi.warm import warm_python
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer

EXAMPLES = ROOT / "examples"
MOST_LINES = 60
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
ONE_STEP = "--max_steps 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --use_cpu true --bf16 false"
GRPO = f"{ONE_STEP} --report_to none --num_generations 2 --max_completion_length 4"
PPO = "--total_episodes 2 --num_mini_batches 1 --num_ppo_epochs 1 --per_device_train_batch_size 2 --report_to none"
OPTIONS = {
    "grpo_async_rules": GRPO,
    "grpo_reward_function": GRPO,
    "grpo_rules": GRPO,
    "grpo_vllm_server": GRPO,
    "reward_model": f"{ONE_STEP} --report_to none",
    "ppo": f"{PPO} --gradient_accumulation_steps 1 --response_length 4 --use_cpu true --bf16 false",
}


def write_rows(folder, rows, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A user's folder: models, and the rows of GSM8K and UltraFeedback that a test needs."""
    folder = tmp_path_factory.mktemp("desk")
    tiny.model("llama").save_pretrained(folder / "tiny")
    reward_model(folder / "tiny_reward").save_pretrained(folder / "tiny_reward")
    for name in ("tiny", "tiny_reward"):
        chat_tokenizer().save_pretrained(folder / name)
    shutil.copytree(folder / "tiny", folder / "tiny_qwen")  # TRL's asynchronous trainer takes known templates only
    template = Path(trl.__file__).with_name("chat_templates") / "qwen2_5.jinja"
    (folder / "tiny_qwen/chat_template.jinja").write_text(template.read_text())
    problems = [{"question": f"What is {n} + 3?", "answer": f"It is {n + 3}.\n#### {n + 3}"} for n in range(16)]
    write_rows(folder / "openai/gsm8k", problems, "train.jsonl")
    (folder / "openai/gsm8k/README.md").write_text(CARD)
    asked = {"role": "user", "content": tiny.words(8)}
    replies = {"chosen": tiny.words(5), "rejected": tiny.words(6)}
    pairs = [{side: [asked, {"role": "assistant", "content": text}] for side, text in replies.items()}] * 8
    write_rows(folder / "trl-lib/ultrafeedback_binarized", pairs, "train.jsonl", "test.jsonl")
    return folder


def run(name, desk, out, *options, **variables):
    """Run a script to its end; return what it printed."""
    words = ["--model", "tiny", "--output_dir", out, *OPTIONS[name].split(), *options]
    return succeeded([warm_python(), EXAMPLES / f"{name}.py", *words], desk, **variables).stdout


def saved(folder) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors", "adapter_model.safetensors"))


def test_a_script_is_short_and_each_has_its_options_here():
    scripts = {path.stem: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == OPTIONS.keys() and max(scripts.values()) <= MOST_LINES


@pytest.mark.parametrize("name", ["grpo_reward_function", "grpo_rules", "reward_model", "ppo"])
def test_a_script_trains_one_step_and_saves(name, desk, tmp_path):
    run(name, desk, tmp_path / "out")
    assert saved(tmp_path / "out")


def test_ppo_takes_the_reward_model_of_the_other_script(desk, tmp_path):
    run("ppo", desk, tmp_path / "out", "--reward_model", "tiny_reward")
    assert saved(tmp_path / "out")


def test_the_script_of_trls_asynchronous_trainer_scores_by_the_rules_in_its_child(desk, tmp_path):
    model, first = ("--model", "tiny_qwen"), str(ROOT / "tests/async_server.py")
    run("grpo_async_rules", desk, tmp_path / "out", *model, RUN_FIRST=first)
    assert "rewards/rules" in (tmp_path / "out/log.jsonl").read_text() and saved(tmp_path / "out")


def test_the_script_with_a_server_trains_on_what_the_server_generates(desk, tmp_path):
    variables = fake_servers.put_on_path(tmp_path / "bin") | {"FAKE_TRL_CLIENT": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["vllm-serve", "--model", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tensor_parallel_size", "1"]
    with subprocess.Popen([sys.executable, fake_servers.PROGRAM, *command], env=environment() | variables) as server:
        try:
            until_s = time.monotonic() + 30
            while not fake_servers.noted(tmp_path / "bin"):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            address = f"http://127.0.0.1:{port}"
            first = {"RUN_FIRST": str(ROOT / "tests/fake_servers.py")}
            run("grpo_vllm_server", desk, tmp_path / "out", "--vllm_server_base_url", address, **variables, **first)
        finally:
            server.kill()
    lines = fake_servers.noted(tmp_path / "bin")
    assert fake_servers.requests(lines, "/v1/completions") and fake_servers.requests(lines, "broadcast")
    assert saved(tmp_path / "out")
