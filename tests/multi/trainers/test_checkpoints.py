"""Two processes save one checkpoint, and come to one end when they resume, over gloo on a tiny Llama."""

import re
import socket

import pytest
import torch

from tests.multi.jobs import checkpoints
from tests.multi.launching import job_command, succeeded
from trl_ext.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    """What each rank says, and what stood on their console."""
    one = tmp_path_factory.mktemp("one")
    checkpoints.trained(one, max_steps=2)
    done = succeeded(job_command("checkpoints", "cpu", folder, of_one_process=one / "checkpoint-2"))
    return torch.load(folder / "facts.pt"), done.stdout + done.stderr


def both(ranks, name):
    """What both ranks say alike."""
    first, second = (facts[name] for facts in ranks[0])
    assert first == second
    return first


@pytest.mark.parametrize("step", [1, 2])
def test_the_resumed_run_is_the_uninterrupted_one(step, ranks):
    assert both(ranks, f"resumed from {step}")


def test_a_run_resumed_within_a_later_epoch_deals_the_rest_of_that_epoch(ranks):
    assert both(ranks, "resumed in the second epoch")


def test_a_file_of_rank_1_that_is_damaged_is_named_on_both(ranks):
    said = both(ranks, "damaged")
    assert "checkpoint-3: rollouts_1.pt is damaged." in said
    assert said.endswith("checkpoint-2 is whole.")


def test_both_fall_back_to_the_same_checkpoint_and_one_says_so(ranks):
    assert both(ranks, "fell back")
    assert ranks[1].count("Passed over checkpoint-4: rng_state_1.pth has 0 bytes") == 1


def test_another_number_of_processes_is_refused_unless_told(ranks, folder, tmp_path):
    assert "processes was 1 and is 2" in both(ranks, "of one process")
    assert both(ranks, "despite") == checkpoints.STEPS
    with pytest.raises(ConfigError, match="processes was 2 and is 1"):
        checkpoints.trained(tmp_path, point=str(folder / "run" / "checkpoint-2"))


def test_a_write_that_fails_on_rank_1_skips_the_checkpoint_on_both(ranks):
    assert both(ranks, "full disk") == [checkpoints.STEPS, [1, 3, 4]]
    assert ranks[1].count("The checkpoint of step 2 could not be written: process 1: ") == 1


# Before step 0 -----------------------------------------------------------------------------------------------------


def test_disks_that_are_not_shared_are_refused_on_both(ranks):
    host = re.escape(socket.gethostname())
    said = f"Process 1 on {host} does not see what process 0 on {host} writes into output_dir .*disk-%d: .*share, or"
    for rank, facts in enumerate(ranks[0]):
        assert re.match(said % rank, facts["own disks"])


def test_unless_the_run_saves_nothing(ranks):
    assert both(ranks, "own disks, no saving") == 1


def test_a_folder_that_another_run_uses_is_refused_on_both(ranks):
    assert "run is in use: process 4711 of ann on node7 trains into it since" in both(ranks, "in use")


def test_another_version_on_rank_1_is_refused_on_both(ranks):
    said = both(ranks, "other versions")
    assert re.match(r"Process 1 on \S+ has accelerate 1\.0\.1, process 0 on \S+ has accelerate 1\.", said)
