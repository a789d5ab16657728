"""Worker of test_environment_ranks: GRPO on two processes, each with sessions of its own on one server."""

import sys

import torch

import trl_ext
from tests import grpo_trainers, tool_task
from tests.train.trainers.test_served_environments import ROWS
from trl_ext.rewards.adapters.environments import EnvironmentReward, nemo_gym


def trained(url: str, folder: str, batch: int) -> torch.Tensor:
    """All weights of a trainer after two steps on sixteen rows a step, in micro-batches of `batch` rows a process."""
    made = nemo_gym(url, turn_reward="reward")
    options = dict(per_device_train_batch_size=batch, rows=ROWS, packing=True)
    subject = tool_task.trainer(trl_ext, folder, EnvironmentReward(), dict(environment_factory=made), **options)
    subject.train()
    return grpo_trainers.weights(subject)


if __name__ == "__main__":
    torch.set_num_threads(1)
    weights = trained(*sys.argv[1:], 4)
    if torch.distributed.get_rank() == 0:
        torch.save(weights, f"{sys.argv[2]}/weights.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
