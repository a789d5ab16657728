"""Worker of test_fail_together: GRPO on two processes whose reward function raises on rank 1 only."""

import sys

import torch
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)


def fails_on_rank_1(completions, **_):
    if torch.distributed.get_rank() == 1:
        raise KeyError("gold")
    return [0.0] * len(completions)


if __name__ == "__main__":
    args = GRPOConfig(
        sys.argv[1],
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=1,
        max_completion_length=4,
        per_device_train_batch_size=8,
    )
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 8})
    GRPOTrainer(tiny.model("llama"), fails_on_rank_1, args, prompts, processing_class=tiny.tokenizer()).train()
