"""One of two processes runs out of memory: both go on in chunks with the same weights, or both end, at once.

On the CPU in fp32, over gloo, on a tiny random Llama; the references are runs of one process with memory enough.
"""

import json
import os

import pytest

from tests.multi import launching
from tests.multi.launching import PROGRAMS, YAMLS, Run, ended, run_job, skip_what_cannot_run
from tests.multi.recipes import write_recipe
from tests.multi.warm import warm_python
from tests.nightly import daily
from trl_ext.scripts.exit import OUT_OF_MEMORY

TOLERANCE = 1e-6
REWARD_TOLERANCE = 2e-6
REWARD_BUDGET = 110


@pytest.fixture
def out_of_memory(monkeypatch):
    """Let rank 1 of a launch fail."""

    def on_rank_1(at: list[int] | None = None, where: str = "forward", model: str = "actor") -> None:
        told = json.dumps({"at": at, "where": where, "model": model})
        first = [str(PROGRAMS / "out_of_memory.py"), launching.ENVIRONMENT.get("RUN_FIRST")]
        monkeypatch.setitem(launching.ENVIRONMENT, "OUT_OF_MEMORY", told)
        monkeypatch.setitem(launching.ENVIRONMENT, "RUN_FIRST", os.pathsep.join(filter(None, first)))

    return on_rank_1


def check_both_went_on(run: Run, num_failed: int, role: str = "actor") -> None:
    ranks = [json.loads((run.folder / f"oom-rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["failed"] for rank in ranks] == [0, num_failed]
    assert ranks[0]["halvings"] == ranks[1]["halvings"]
    assert {name: number for name, number in ranks[0]["halvings"].items() if number} == {role: num_failed}


# Both go on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", daily(["cpu", "zero2"], "zero2"))
def test_two_processes_split_together_in_grpo(name, out_of_memory, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    grpo = run_job("grpo", None, tmp_path / "alone", model=tiny_model)
    # A step has two forwards or so of several rows: the second one fails, and one of a later step.
    out_of_memory([1, 4])
    run = run_job("grpo", name, tmp_path / "out", model=tiny_model, packing=True, max_tokens=60)
    check_both_went_on(run, 2)
    assert run.facts["zero_stage"] == (2 if name == "zero2" else 0)
    assert run.distance(grpo) <= TOLERANCE


@pytest.mark.nightly
def test_two_processes_with_unequal_pairs_split_together(out_of_memory, tiny_reward_model, tmp_path):
    reward = run_job("reward", None, tmp_path / "alone", model=tiny_reward_model, library="trl")
    out_of_memory([3])
    run = run_job("reward", "cpu", tmp_path / "out", model=tiny_reward_model, max_tokens_per_forward=REWARD_BUDGET)
    check_both_went_on(run, 1)
    assert run.facts["loss"] == pytest.approx(reward.facts["loss"], rel=1e-6, abs=1e-6)
    assert run.facts["accuracy"] == pytest.approx(reward.facts["accuracy"])
    assert run.distance(reward) <= REWARD_TOLERANCE


def test_two_processes_with_an_uneven_last_batch_split_together(out_of_memory, tiny_reward_model, tmp_path):
    """Batches of 7 and 3 pairs, cut in four: an empty forward of one rank goes with a pair of the other."""
    options = dict(per_device_train_batch_size=7, gradient_accumulation_steps=1, steps=2, per_device_eval_batch_size=6)
    options |= dict(model=tiny_reward_model, accelerator_config={"even_batches": False})
    whole = run_job("reward", "cpu", tmp_path / "whole", **options)
    assert [rank["pairs_of_forwards"] for rank in whole.ranks] == [[7, 7], [7, 3]]
    out_of_memory([0, 1])
    run = run_job("reward", "cpu", tmp_path / "out", **options)
    check_both_went_on(run, 2)
    assert [rank["pairs_of_forwards"][-4:] for rank in run.ranks] == [[2, 2, 2, 1], [1, 1, 1, 0]]
    assert run.facts["loss"] == pytest.approx(whole.facts["loss"], abs=1e-6)
    assert run.distance(whole) <= REWARD_TOLERANCE


@pytest.mark.parametrize("name", daily(["cpu", "zero2"], "cpu"))
def test_a_separate_critic_splits_on_its_own(name, out_of_memory, tiny_model, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    options = dict(model=tiny_model, reward_model=tiny_reward_model, critics=["separate"])
    ppo = run_job("ppo", None, tmp_path / "alone", **options).part("separate")
    out_of_memory([4], model="critic")
    run = run_job("ppo", name, tmp_path / "out", packing=True, **options).part("separate")
    check_both_went_on(run, 1, "critic")
    assert run.distance(ppo) <= TOLERANCE


# Both end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tiny_model, tmp_path):
    """Runs `trl-ext grpo` on two processes under a launch file; its exit code and output."""
    options = dict(output_dir=str(tmp_path / "out"), max_steps=2, save_strategy="no")
    recipe = write_recipe("grpo", tiny_model, tmp_path, **options)

    def run(name: str) -> tuple[int, str]:
        command = [warm_python(), "-m", "trl_ext.cli.main", "grpo", "--config", recipe]
        command += ["--config_file", YAMLS[name], "--num_processes", 2, "--main_process_port", 0]
        done = ended(command)
        return done.returncode, done.stdout + done.stderr

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
    out_of_memory(where=where)
    code, log = script(name)
    assert code == OUT_OF_MEMORY, log[-4000:]
    assert words in log
    assert log.count("\nerror: Out of memory in the ") == 1
    assert "error: a process ran out of memory; its message above names what would fit." in log
