"""Two processes save one checkpoint, and come to one end when they resume, over gloo on a tiny Llama."""

import json
import subprocess

import pytest

from tests.multi.launching import PROGRAMS, environment, launched
from tests.multi.programs import checkpoint_worker
from trl_ext.errors import ConfigError

WORKER = PROGRAMS / "checkpoint_worker.py"
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank says, and the folder of their run."""
    folder, one = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    checkpoint_worker.trained(one, max_steps=2)
    command = list(map(str, [*launched("cpu", 2), WORKER, folder, one / "checkpoint-2"]))
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(2)], done.stdout, folder


def both(ranks, name):
    """What both ranks say alike."""
    first, second = (facts[name] for facts in ranks[0])
    assert first == second
    return first


@pytest.mark.parametrize("step", [1, 2])
def test_the_resumed_run_is_the_uninterrupted_one(step, ranks):
    assert both(ranks, f"resumed from {step}")


def test_a_file_of_rank_1_that_is_damaged_is_named_on_both(ranks):
    said = both(ranks, "damaged")
    assert "checkpoint-3: rollouts_1.pt is damaged." in said
    assert said.endswith("checkpoint-2 is whole.")


def test_both_fall_back_to_the_same_checkpoint_and_one_says_so(ranks):
    assert both(ranks, "fell back")
    assert ranks[1].count("Passed over checkpoint-4: rng_state_1.pth has 0 bytes") == 1


def test_another_number_of_processes_is_refused_unless_told(ranks, tmp_path):
    assert "processes was 1 and is 2" in both(ranks, "of one process")
    assert both(ranks, "despite") == checkpoint_worker.STEPS
    with pytest.raises(ConfigError, match="processes was 2 and is 1"):
        checkpoint_worker.trained(tmp_path, point=str(ranks[2] / "run" / "checkpoint-2"))


def test_a_write_that_fails_on_rank_1_skips_the_checkpoint_on_both(ranks):
    assert both(ranks, "full disk") == [checkpoint_worker.STEPS, [1, 3, 4]]
    assert ranks[1].count("The checkpoint of step 2 could not be written: process 1: ") == 1


def test_on_disks_that_are_not_shared_each_finishes_its_part_and_resuming_says_what_is_needed(ranks):
    parts = [set(facts["own disks"]) for facts in ranks[0]]
    assert {"model.safetensors", "manifest.json", "rng_state_0.pth", "rollouts_0.pt"} < parts[0]
    assert parts[1] == {"manifest.json", "rng_state_1.pth", "rollouts_1.pt"}
    assert ranks[1].count("is not one folder for all processes: 2 machines write each a part") == 1
    for rank, facts in enumerate(ranks[0]):
        for name in ("own disks, resumed", "own disks, named"):
            sentence = facts[name].replace(f"disk-{rank}", "disk")
            assert sentence == ranks[0][0][name].replace("disk-0", "disk")
            assert "parts lie on 2 disks that are not shared: copy the folders of all machines into one" in sentence
