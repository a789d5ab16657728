"""Samples of the block before: two processes train what one does that waits for servers one block behind."""

from functools import cache

import pytest

from tests.multi.launching import run_job, skip_what_cannot_run
from tests.nightly import daily, nightly

TOLERANCE = 1e-6
KINDS = ("grpo", "adapter", "separate", "head")


@pytest.fixture(scope="module")
def replay(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return cache(lambda kind: run_job("ahead", None, folder / kind, model=tiny_model, kind=kind, ahead=0))


@pytest.fixture(scope="module")
def ahead(tiny_model, tmp_path_factory):
    """A run of two processes, by launch file and kind; each is launched once."""

    @cache
    def run(launch, kind):
        skip_what_cannot_run(launch)
        return run_job("ahead", launch, tmp_path_factory.mktemp(kind), model=tiny_model, kind=kind, ahead=1)

    return run


LAUNCHES = [(launch, kind) for launch in ("multi_gpu", "zero2", "zero3") for kind in KINDS]


@pytest.mark.parametrize(("launch", "kind"), [one if one == LAUNCHES[0] else nightly(*one) for one in LAUNCHES])
def test_two_processes_train_the_replay(launch, kind, replay, ahead):
    run = ahead(launch, kind)
    assert run.facts["behind"] == [0.0, 1.0, 1.0, 1.0]
    assert run.distance(replay(kind)) <= TOLERANCE


@pytest.mark.parametrize("step", daily([1, 2, 3], 1))
def test_a_resumed_run_ends_with_the_same_bits(step, ahead, tiny_model, tmp_path):
    whole = ahead("multi_gpu", "grpo")
    options = dict(model=tiny_model, kind="grpo", ahead=1, resume_from=whole.folder / f"checkpoint-{step}")
    assert run_job("ahead", "multi_gpu", tmp_path, **options).distance(whole) == 0.0
