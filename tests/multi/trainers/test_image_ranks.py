"""Rows with images on two processes, of which one may have none, train what one process of TRL does, to 1e-6."""

import pytest

from tests import tiny_images
from tests.multi.launching import JSONS, distance, run_job, skip_what_cannot_run
from tests.nightly import nightly

TOLERANCE = 1e-6
# The smallest image's: of a forward without images on a process beside one with some.
BLACK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_image_model")
    # ZeRO-3 leaves matrices below 1e5 entries whole (stage3_param_persistence_threshold).
    tiny_images.model("qwen3_vl", intermediate_size=2048).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"text_step": True},
        # A step without images has no gradient for the tower alone, and one of zero, with Adam's momentum, under ZeRO.
        nightly({"deepspeed": str(JSONS["zero3"]), "kept": True}),
    ],
    ids=["DDP", "ZeRO-3"],
)
def test_a_process_without_images_trains_with_one_that_has_some_what_trl_does_alone(options, model, tmp_path):
    skip_what_cannot_run("zero3" if "deepspeed" in options else "cpu")
    text_step = options.get("text_step", False)
    expected = run_job("image", None, tmp_path / "alone", model=model, library="trl", text_step=text_step)
    run = run_job("image", "cpu", tmp_path / "out", model=model, **options)
    weights = {plain_name(name): weight for name, weight in run.weights.items()}
    print(f"largest weight difference: {distance(weights, expected.weights):.1e}")
    assert run.facts["world_size"] == 2
    assert min(run.facts["padded_over_forwarded"]) > 1
    assert BLACK in run.facts["patches"]
    assert distance(weights, expected.weights) <= TOLERANCE


def plain_name(name):
    """transformers inserts `model.` into the names of a composite model that it saves under ZeRO-3."""
    return name.replace("language_model.model.", "language_model.")
