"""Groups that lie across two ranks are replaced by spares of either: the update is TRL's on those that were kept."""

import subprocess

import pytest
import torch
import trl

from tests.conftest import ROOT
from tests.multi.launching import TIMEOUT_S, environment, launched
from tests.multi.programs.oversample_worker import KEPT, rollouts
from tests.train.trainers.grpo.test_oversampling import made, weights


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("two")
    command = [*launched("cpu", 2), "-m", "tests.multi.programs.oversample_worker", folder]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment(), timeout=TIMEOUT_S, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "facts.pt")


def test_the_update_of_two_ranks_is_trls_on_the_kept_groups(facts, tmp_path):
    batch = dict(per_device_train_batch_size=6, gradient_accumulation_steps=2)
    theirs = weights(made(trl, tmp_path, KEPT, rollouts=rollouts, **batch))
    assert (facts["weights"] - theirs).abs().max() <= 1e-6


def test_the_metrics_are_of_all_ranks(facts):
    names = ("groups_sampled", "groups_replaced", "groups_without_variance_kept")
    logged = [[log[f"oversample/{name}"] for name in names] for log in facts["log"][:2]]
    assert logged == [[5, 2, 0], [5, 1, 0]]
    assert [log["frac_reward_zero_std"] for log in facts["log"][:2]] == pytest.approx([2 / 5, 1 / 5])
