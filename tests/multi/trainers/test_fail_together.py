"""What goes wrong on one rank ends the run on all of them, at once and with a sentence."""

import pytest

from tests.multi.launching import ended, job_command


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> str:
    done = ended(job_command("failing", "cpu", tmp_path_factory.mktemp("out")))
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_reward_that_raises_on_one_rank_ends_both(log):
    assert log.count("RuleError: On rank 1 the reward 'fails_on_rank_1' raised:") >= 2


def test_the_traceback_of_the_reward_is_shown(log):
    assert "KeyError: 'gold'" in log
    assert "in fails_on_rank_1" in log


def test_log_probabilities_that_do_not_fit_the_tokens_of_one_rank_are_refused_on_both(log):
    for rank in range(2):
        assert f"rank {rank} refused: Row 0 of rank 1 has 2 sampled tokens, and 1 log-probabilities of them." in log


def test_a_row_of_a_stream_that_is_bad_on_one_rank_is_refused_on_both(log):
    for rank in range(2):
        assert f"rank {rank} refused: On rank 1 a row came with a blank prompt; its prompt begins ' '." in log


def test_an_environment_that_raises_on_one_rank_ends_both(tmp_path):
    done = ended(job_command("failing environment", "cpu", tmp_path))
    assert done.returncode != 0
    assert "OSError: the game server is away" in done.stderr
