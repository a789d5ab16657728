"""Worker of test_fail_together: GRPO on two processes, of which rank 1 alone gets a bad row, then a bad reward."""

import sys

import torch
from datasets import Dataset, IterableDataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.errors import DataError

torch.set_num_threads(1)


def fails_on_rank_1(completions, **_):
    if torch.distributed.get_rank() == 1:
        raise KeyError("gold")
    return [0.0] * len(completions)


def blank_on_rank_1():
    """A stream of which each rank takes one prompt at a time."""
    yield from ({"prompt": prompt} for prompt in (tiny.words(5, 6), " "))


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
    options = dict(processing_class=tiny.tokenizer())
    args.shuffle_dataset = False
    stream = IterableDataset.from_generator(blank_on_rank_1)
    try:
        GRPOTrainer(tiny.model("llama"), fails_on_rank_1, args, stream, **options).train()
    except DataError as error:
        print(f"rank {torch.distributed.get_rank()} refused: {error}")
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 8})
    GRPOTrainer(tiny.model("llama"), fails_on_rank_1, args, prompts, **options).train()
