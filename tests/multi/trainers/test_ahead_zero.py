"""Samples of the block before: two processes train what one does that waits for servers one block behind."""

import pytest

from tests.multi.launching import PROGRAMS, launched, run_worker, skip_what_cannot_run
from tests.multi.warm import warm_python

WORKER = PROGRAMS / "ahead_worker.py"
TOLERANCE = 1e-6


def saved(kind):
    return "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"


@pytest.fixture(scope="module")
def replay(tiny_model, tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("replay"), {}

    def of(kind):
        if kind not in runs:
            options = ["--kind", kind, "--ahead", 0]
            runs[kind] = run_worker(
                WORKER, [warm_python()], tiny_model, folder / kind, 1, *options, weights=saved(kind)
            )
        return runs[kind]

    return of


NIGHTLY = pytest.mark.nightly
LAUNCHES = [
    ("multi_gpu", "grpo"),
    ("zero3", "head"),
    *(pytest.param("zero2", kind, marks=NIGHTLY) for kind in ("grpo", "adapter", "separate", "head")),
    *(pytest.param("zero3", kind, marks=NIGHTLY) for kind in ("grpo", "adapter", "separate")),
    *(pytest.param("multi_gpu", kind, marks=NIGHTLY) for kind in ("adapter", "separate", "head")),
]


@pytest.mark.parametrize(("launch", "kind"), LAUNCHES)
def test_two_processes_train_the_replay(launch, kind, replay, tiny_model, tmp_path):
    skip_what_cannot_run(launch)
    options = ["--kind", kind, "--ahead", 1]
    run = run_worker(WORKER, launched(launch, 2), tiny_model, tmp_path / "run", 2, *options, weights=saved(kind))
    assert run.facts["behind"] == [0.0, 1.0, 1.0, 1.0]
    assert run.distance(replay(kind)) <= TOLERANCE


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=NIGHTLY), pytest.param(3, marks=NIGHTLY)])
def test_a_resumed_run_ends_with_the_same_bits(step, tiny_model, tmp_path):
    options = ["--kind", "grpo", "--ahead", 1]
    whole = run_worker(WORKER, launched("multi_gpu", 2), tiny_model, tmp_path / "whole", 2, *options)
    options += ["--resume_from", tmp_path / "whole" / f"checkpoint-{step}"]
    again = run_worker(WORKER, launched("multi_gpu", 2), tiny_model, tmp_path / "again", 2, *options)
    assert again.distance(whole) == 0.0
