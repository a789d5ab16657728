"""Rows with images on two processes, of which one may have none, train what one process of TRL does, to 1e-6."""

from dataclasses import replace
from functools import cache

import pytest

from tests import tiny_images
from tests.multi.launching import JSONS, PROGRAMS, launched, run_worker, skip_what_cannot_run
from tests.multi.warm import warm_python

WORKER = PROGRAMS / "image_worker.py"
TOLERANCE = 1e-6
# The smallest image's: of a forward without images on a process beside one with some.
BLACK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_image_model")
    # ZeRO-3 leaves matrices below 1e5 entries whole (stage3_param_persistence_threshold).
    tiny_images.model("qwen3_vl", intermediate_size=2048).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """A run of TRL in one process, by its options."""

    @cache
    def run(*options):
        folder = tmp_path_factory.mktemp("alone")
        return run_worker(WORKER, [warm_python()], model, folder / "out", 1, "--library", "trl", *options)

    return run


def check(run, expected):
    print(f"largest weight difference: {run.distance(expected):.1e}")
    assert run.facts["world_size"] == 2
    assert min(run.facts["padded_over_forwarded"]) > 1
    assert BLACK in run.facts["patches"]
    assert run.distance(expected) <= TOLERANCE


def test_two_processes_train_what_trl_does_alone(alone, model, tmp_path):
    run = run_worker(WORKER, launched("cpu", 2), model, tmp_path / "out", 2, "--text_step")
    check(run, alone("--text_step"))


def test_under_zero3_a_process_without_images_trains_with_one_that_has_some(alone, model, tmp_path):
    skip_what_cannot_run("zero3")
    # A step without images has no gradient for the tower alone, and one of zero, with Adam's momentum, under ZeRO.
    options = ("--deepspeed", JSONS["zero3"], "--kept")
    run = run_worker(WORKER, launched("cpu", 2), model, tmp_path / "out", 2, *options)
    check(replace(run, weights={plain_name(name): weight for name, weight in run.weights.items()}), alone())


def plain_name(name):
    """transformers inserts `model.` into the names of a composite model that it saves under ZeRO-3."""
    return name.replace("language_model.model.", "language_model.")
