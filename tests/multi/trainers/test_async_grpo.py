"""`trl_ext.AsyncGRPOTrainer` on two processes, to which TRL deals rows, trains the weights of a single process."""

import json

import pytest

from tests.multi import launching
from tests.multi.launching import PROGRAMS, Run, run_job

TOLERANCE = 1e-6


def metric(run: Run, name: str) -> list[float]:
    return [step[name] for step in run.facts if name in step]


@pytest.mark.parametrize("launch", ["cpu", "fsdp2"])
def test_two_processes_train_the_weights_of_one(launch, tmp_path, monkeypatch):
    whole = run_job("async grpo", None, tmp_path / "one", batch=8)
    if launch == "fsdp2":
        monkeypatch.setitem(launching.ENVIRONMENT, "RUN_FIRST", str(PROGRAMS / "fsdp_on_cpu.py"))
        monkeypatch.setitem(launching.ENVIRONMENT, "SHARDED", str(tmp_path / "sharded.json"))
    run = run_job("async grpo", launch, tmp_path / "two", batch=4)
    if launch == "fsdp2":
        shares = json.loads((tmp_path / "sharded.json").read_text())["shares"]
        assert len(shares) > 15 and max(shares) < 0.51  # of 199 rows of the vocabulary process 0 has 100
    print(f"largest weight difference: {run.distance(whole):.1e}")  # pytest -rP shows it
    assert run.distance(whole) <= TOLERANCE
    assert metric(run, "reward") == pytest.approx(metric(whole, "reward"), abs=1e-6)
    away = "sampling/logit_difference"
    assert len(metric(run, away)) == 2
    assert metric(run, away) == pytest.approx(metric(whole, away), abs=1e-4)
    assert (tmp_path / "two" / "run" / "log.jsonl").is_file()
