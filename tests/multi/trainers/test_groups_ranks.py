"""Groups that lie across two ranks: replaced by spares, drawn by a curriculum, played in environments."""

import pytest
import torch
import trl

from tests import grpo_trainers, tiny, tool_task
from tests.environment_servers import GymServer
from tests.multi.jobs.groups import KEPT, draw, play, rollouts
from tests.multi.launching import run_job
from tests.train.trainers.grpo.test_held_out_rewards import expected
from tests.train.trainers.grpo.test_oversampling import made, weights


@pytest.fixture(scope="module")
def oversampled(tmp_path_factory) -> dict:
    return run_job("oversampling", "cpu", tmp_path_factory.mktemp("two")).facts


def test_the_update_of_two_ranks_is_trls_on_the_kept_groups(oversampled, tmp_path):
    batch = dict(per_device_train_batch_size=6, gradient_accumulation_steps=2)
    theirs = weights(made(trl, tmp_path, KEPT, rollouts=rollouts, **batch))
    assert (oversampled["weights"] - theirs).abs().max() <= 1e-6


def test_the_metrics_of_oversampling_are_of_all_ranks(oversampled):
    names = ("groups_sampled", "groups_replaced", "groups_without_variance_kept")
    logged = [[log[f"oversample/{name}"] for name in names] for log in oversampled["log"][:2]]
    assert logged == [[5, 2, 0], [5, 1, 0]]
    assert [log["frac_reward_zero_std"] for log in oversampled["log"][:2]] == pytest.approx([2 / 5, 1 / 5])


def test_a_curriculum_on_two_processes_draws_the_rows_and_learns_what_it_does_on_one(tmp_path):
    two = run_job("curriculum", "cpu", tmp_path / "two").facts
    one = draw(tmp_path / "one", per_device_train_batch_size=12, gradient_accumulation_steps=1)
    assert (two["weights"] - one["weights"]).abs().max() <= 1e-6
    keys = ("pass_rate_mean", "unseen_frac")
    of_two, of_one = (
        [[log[f"curriculum/{key}"] for key in keys] for log in facts["log"][:10]] for facts in (two, one)
    )
    assert of_two == of_one
    assert of_one[-1][0] < 1


# The second and fourth take each row of the last batches from the first batch on the second process.
EVALUATED = [("grpo", 3, 4, 4), ("grpo", 5, 4, 2), ("grpo", 7, 4, 4), ("ppo", 3, 4, 4)]


def test_rows_that_fill_the_last_batch_of_two_processes_count_in_no_reward(tmp_path):
    logs = run_job("evaluation", "cpu", tmp_path, cases=EVALUATED).facts
    for (_, num_rows, _, group), logged in zip(EVALUATED, logs, strict=True):
        wanted = expected(num_rows, group)
        assert {name: logged[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.nightly
def test_two_processes_with_sessions_of_either_train_to_the_weights_of_one(tmp_path):
    with GymServer() as server:
        two = run_job("environment", "cpu", tmp_path / "two", url=server.url, batch=4).facts["weights"]
        num_sessions = len(server.sessions)
        one = play(tmp_path / "one", server.url, 8)["weights"]
        assert len(server.sessions) == 2 * num_sessions == 2 * 2 * 16
    before = torch.cat([w.flatten() for w in tiny.model("llama", vocab_size=len(tool_task.WORDS)).parameters()])
    assert (one - before).abs().max() > 1e-4 and (one - two).abs().max() <= grpo_trainers.WEIGHT_TOLERANCE
