"""Worker of test_fail_together: GRPO on two processes, in which rank 1's environment raises at its reset."""

import sys

import torch
from datasets import Dataset

import trl_ext
from tests import tool_task

torch.set_num_threads(1)


class Away:
    """An environment that rank 1 cannot reach."""

    def reset(self, **_) -> str:
        if torch.distributed.get_rank() == 1:
            raise OSError("the game server is away")
        return "1 + 2 ="

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def get_reward(self) -> float:
        return 0.0


if __name__ == "__main__":
    rows = Dataset.from_dict({"level": list(range(16))})
    tool_task.trainer(trl_ext, sys.argv[1], rows=rows, options=dict(environment_factory=Away)).train()
