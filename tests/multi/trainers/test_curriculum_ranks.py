"""A curriculum on two processes draws the rows, and trains the weights, that it does on one."""

import subprocess

import torch

from tests.conftest import ROOT
from tests.multi.launching import TIMEOUT_S, environment, launched
from tests.multi.programs.curriculum_worker import trained


def test_two_processes_draw_and_learn_what_one_does(tmp_path):
    command = [*launched("cpu", 2), "-m", "tests.multi.programs.curriculum_worker", tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment(), timeout=TIMEOUT_S, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two, one = (
        torch.load(tmp_path / "facts.pt"),
        trained(tmp_path / "one", per_device_train_batch_size=12, gradient_accumulation_steps=1),
    )
    assert (two["weights"] - one["weights"]).abs().max() <= 1e-6
    keys = ("pass_rate_mean", "unseen_frac")
    of_two, of_one = (
        [[log[f"curriculum/{key}"] for key in keys] for log in facts["log"][:10]] for facts in (two, one)
    )
    assert of_two == of_one
    assert of_one[-1][0] < 1
