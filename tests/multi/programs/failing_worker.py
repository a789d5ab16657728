"""Worker of test_fail_together: GRPO on two processes: rank 1 alone gets a bad row, bad rollouts, a bad reward."""

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


def short_on_rank_1(prompts, trainer):
    num_logps = 2 - trainer.accelerator.process_index
    columns = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-1.0] * num_logps}
    return {name: [value] * len(prompts) for name, value in columns.items()}


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
    try:
        GRPOTrainer(
            tiny.model("llama"), fails_on_rank_1, args, prompts, rollout_func=short_on_rank_1, **options
        ).train()
    except DataError as error:
        print(f"rank {torch.distributed.get_rank()} refused: {error}")
    GRPOTrainer(tiny.model("llama"), fails_on_rank_1, args, prompts, **options).train()
