"""Processes that share rows train what processes train that forward rows of their own: the same weights, to 1e-6."""

from functools import cache

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.multi.jobs.sequence import CASES, save_models
from tests.multi.launching import distance, run_job

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

    @cache
    def of(num_processes: int) -> dict:
        _, sizes, cases = next(launch for launch in LAUNCHES if launch[0] == num_processes)
        folder = tmp_path_factory.mktemp("sequence")
        save_models(folder)
        options = dict(models=folder, sizes=sizes, cases=cases)
        return run_job("sequence", "cpu", folder / "out", num_processes, **options).facts

    return of


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
