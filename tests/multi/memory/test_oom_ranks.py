"""One of two processes runs out of memory: both go on in chunks with the same weights, or both end, at once.

On the CPU in fp32, over gloo, on a tiny random Llama; the references are runs of one process with memory enough.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.multi import launching
from tests.multi.launching import PROGRAMS, Run, facts_of, launched, loaded, run_worker, skip_what_cannot_run
from tests.multi.warm import warm_python
from trl_ext.scripts.exit import OUT_OF_MEMORY

WORKER = PROGRAMS / "oom_worker.py"
TOLERANCE = 1e-6
REWARD_TOLERANCE = 2e-6
REWARD_BUDGET = 110
TIMEOUT_S = 900  # of a run that hangs: the process group's own patience is 30 minutes
LAUNCH = """
import sys
from trl_ext.launch.accelerate import launch
from trl_ext.scripts.grpo import make_parser
sys.exit(launch("tests.multi.programs.oom_worker", make_parser("grpo"), sys.argv[1:]))
"""


@pytest.fixture
def out_of_memory(monkeypatch):
    """Let the worker's rank 1 fail."""

    def on_rank_1(runs: str, at: str = "", where: str = "forward", model: str = "actor") -> None:
        told = {"OOM_RUNS": runs, "OOM_RANK": "1", "OOM_AT": at, "OOM_IN": where, "OOM_MODEL": model}
        for name, value in told.items():
            monkeypatch.setitem(launching.ENVIRONMENT, name, value)

    return on_rank_1


def told(folder: Path) -> list[dict]:
    """What each rank says of its forwards."""
    return [json.loads((folder / f"oom-rank{rank}.json").read_text()) for rank in range(2)]


def check_both_went_on(ranks: list[dict], num_failed: int, role: str = "actor") -> None:
    assert [rank["failed"] for rank in ranks] == [0, num_failed]
    assert ranks[0]["halvings"] == ranks[1]["halvings"]
    assert ranks[0]["halvings"][role] == num_failed


# Both go on -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpo(tiny_model, tmp_path_factory):
    return run_worker(
        PROGRAMS / "zero_worker.py", [warm_python()], tiny_model, tmp_path_factory.mktemp("grpo") / "out", 1
    )


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=pytest.mark.nightly), "zero2"])
def test_two_processes_split_together_in_grpo(name, grpo, out_of_memory, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    # A step has two forwards or so of several rows: the second one fails, and one of a later step.
    out_of_memory("tests.multi.programs.zero_worker", at="1,4")
    run = run_worker(WORKER, launched(name, 2), tiny_model, tmp_path / "out", 2, "--packing", "--max_tokens", 60)
    check_both_went_on(told(run.folder), 2)
    assert run.facts["zero_stage"] == (2 if name == "zero2" else 0)
    assert run.distance(grpo) <= TOLERANCE


@pytest.fixture(scope="module")
def reward(tiny_reward_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "out"
    return run_worker(PROGRAMS / "reward_worker.py", [warm_python()], tiny_reward_model, folder, 1, "--library", "trl")


def test_two_processes_with_unequal_pairs_split_together(reward, out_of_memory, tiny_reward_model, tmp_path):
    out_of_memory("tests.multi.programs.reward_worker", at="3")
    options = ("--budget", REWARD_BUDGET)
    run = run_worker(WORKER, launched("cpu", 2), tiny_reward_model, tmp_path / "out", 2, *options)
    check_both_went_on(told(run.folder), 1)
    assert run.facts["loss"] == pytest.approx(reward.facts["loss"], rel=1e-6, abs=1e-6)
    assert run.facts["accuracy"] == pytest.approx(reward.facts["accuracy"])
    assert run.distance(reward) <= REWARD_TOLERANCE


def ppo_run(worker, command, num_processes, models, folder, *options) -> Run:
    model, reward_model = models
    options = ("--reward_model", reward_model, "--critics", "separate", *options)
    facts = facts_of(worker, command, model, folder, num_processes, *options)
    own = folder / "separate"
    files = [*own.glob("*.safetensors"), *own.glob("critic/*.safetensors")]
    weights = {f"{file.relative_to(own)} {name}": w for file in files for name, w in loaded(file).items()}
    return Run(facts["separate"], weights, own)


@pytest.mark.parametrize("name", ["cpu", pytest.param("zero2", marks=pytest.mark.nightly)])
def test_a_separate_critic_splits_on_its_own(name, out_of_memory, tiny_model, tiny_reward_model, ppo, tmp_path):
    skip_what_cannot_run(name)
    out_of_memory("tests.multi.programs.ppo_worker", at="4", model="critic")
    models = (tiny_model, tiny_reward_model)
    run = ppo_run(WORKER, launched(name, 2), 2, models, tmp_path / "out", "--packing")
    ranks = told(run.folder)
    check_both_went_on(ranks, 1, "critic")
    assert "actor" not in ranks[0]["halvings"] or ranks[0]["halvings"]["actor"] == 0
    assert run.distance(ppo) <= TOLERANCE


@pytest.fixture(scope="module")
def ppo(tiny_model, tiny_reward_model, tmp_path_factory):
    models = (tiny_model, tiny_reward_model)
    return ppo_run(PROGRAMS / "ppo_worker.py", [warm_python()], 1, models, tmp_path_factory.mktemp("ppo") / "out")


# Both end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tiny_model, tmp_path):
    """Runs `trl-ext grpo` on two processes under a launch file; its exit code and output."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(16)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = dict(
        model_name_or_path=str(tiny_model),
        dataset_name=str(data),
        output_dir=str(tmp_path / "out"),
        rules=[{"rule": "length", "high": 4, "slack": 4}],
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(name: str) -> tuple[int, str]:
        launcher = ["--config_file", str(launching.YAMLS[name]), "--num_processes", "2", "--main_process_port", "0"]
        command = [sys.executable, "-c", LAUNCH, "--config", str(tmp_path / "recipe.yaml"), *launcher]
        log = tmp_path / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=launching.environment(), stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session, started above
                pytest.fail(f"still there after {TIMEOUT_S} s\n{log.read_text()[-4000:]}", pytrace=False)
        return code, log.read_text()

    return run


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("cpu", "forward", "Out of memory in the forward: step 1, rank 1, 1 row of"),
        ("cpu", "backward", "Out of memory in the backward: step 1, rank 1"),
        ("zero3", "forward", "under ZeRO-3 the other ranks wait for this one's weights"),
    ],
)
def test_what_cannot_go_on_ends_both_with_the_message_and_its_exit_code(name, where, words, out_of_memory, script):
    skip_what_cannot_run(name)
    out_of_memory("trl_ext.scripts.grpo", where=where)
    code, log = script(name)
    assert code == OUT_OF_MEMORY, log[-4000:]
    assert words in log
    assert log.count("\nerror: Out of memory in the ") == 1
    assert "error: a process ran out of memory; its message above names what would fit." in log
