"""Processes that share rows train what processes train that forward rows of their own: the same weights, to 1e-6."""

import json
import subprocess

import pytest
import torch

from tests.conftest import ROOT
from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import TIMEOUT_S, environment, launched
from tests.multi.programs.sequence_worker import CASES, save_models

TOLERANCE = 1e-6
# Processes, how many of them share a row, and what they train: without TRL_EXT_THOROUGH=1, what takes seconds.
LAUNCHES = [(2, [2], ["reference model", "adapter", "nothing to learn"])]
if IS_THOROUGH:
    LAUNCHES = [(2, [2], list(CASES)), (4, [2, 4], list(CASES))]
RUNS = [(count, size, case) for count, sizes, cases in LAUNCHES for size in sizes for case in cases]
# Tokens through the model: groups plan other forwards, with a prompt more or less and padding to their size. The mean
# loss of a run is over the steps that it made itself, and one is resumed.
_NOT_COMPARED = (
    "packing/forwarded",
    "packing/padded",
    "packing/kernels",
    "phase/",
    "_runtime",
    "_per_second",
    "step_time",
    "train_loss",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of a number of processes, by case and size of groups: weights, and what was logged."""
    done = {}

    def of(num_processes: int) -> dict:
        if num_processes not in done:
            _, sizes, cases = next(launch for launch in LAUNCHES if launch[0] == num_processes)
            file = tmp_path_factory.mktemp("sequence") / "got.pt"
            save_models(file.parent)
            worker = ["-m", "tests.multi.programs.sequence_worker", file, json.dumps(sizes), json.dumps(cases)]
            command = list(map(str, [*launched("cpu", num_processes), *worker]))
            run = subprocess.run(command, cwd=ROOT, env=environment(), timeout=TIMEOUT_S, capture_output=True)
            assert run.returncode == 0, run.stderr[-6000:].decode()
            done[num_processes] = torch.load(file)
        return done[num_processes]

    return of


def distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys() and one
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(("num_processes", "size", "case"), RUNS)
def test_weights_are_those_of_processes_that_share_no_rows(trained, num_processes, size, case):
    got = trained(num_processes)
    print(f"largest weight difference: {distance(got[case, size]['weights'], got[case, 1]['weights']):.1e}")
    assert distance(got[case, size]["weights"], got[case, 1]["weights"]) <= TOLERANCE
    assert got[case, size]["zero_stage"] == int(case.removeprefix("zero") if case.startswith("zero") else 0)


@pytest.mark.parametrize(("num_processes", "size", "case"), RUNS)
def test_logged_numbers_are_those_of_processes_that_share_no_rows(trained, num_processes, size, case):
    ours, others = (trained(num_processes)[case, number]["logged"] for number in (size, 1))
    assert len(ours) == len(others)
    assert next(entry["grad_norm"] for entry in ours if "grad_norm" in entry) > 0.01, "there is nothing to compare"
    for mine, other in zip(ours, others, strict=True):
        assert mine.keys() == other.keys()
        for name in [name for name in mine if not any(part in name for part in _NOT_COMPARED)]:
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name


def test_a_forward_that_runs_out_of_memory_is_not_split_since_its_group_waits(trained):
    got = trained(2)
    assert "the others of its group wait" in got["reference model", 2]["why_not_split"]
    assert got["reference model", 1]["why_not_split"] == ""
