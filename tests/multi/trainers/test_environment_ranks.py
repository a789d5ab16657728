"""Environments behind HTTP on two ranks: sessions of either, and the update of one process."""

import pytest
import torch

from tests import grpo_trainers, tiny, tool_task
from tests.environment_servers import GymServer
from tests.multi.programs.environment_worker import trained
from tests.multi.trainers.test_fail_together import launch
from tests.multi.warm import warm_python


@pytest.mark.nightly
def test_two_processes_train_to_the_weights_of_one(tmp_path):
    with GymServer() as server:
        done = launch(
            "-m", "tests.multi.programs.environment_worker", server.url, str(tmp_path), python=str(warm_python())
        )
        assert done.returncode == 0, done.stdout[-3000:]
        num_sessions, two = len(server.sessions), torch.load(tmp_path / "weights.pt")
        one = trained(server.url, str(tmp_path), 8)
        assert len(server.sessions) == 2 * num_sessions == 2 * 2 * 16
    before = torch.cat([w.flatten() for w in tiny.model("llama", vocab_size=len(tool_task.WORDS)).parameters()])
    assert (one - before).abs().max() > 1e-4 and (one - two).abs().max() <= grpo_trainers.WEIGHT_TOLERANCE
