"""GRPO on two processes, where rank 1 alone gets a bad row, bad rollouts, a bad reward, or no environment."""

import torch
from datasets import Dataset, IterableDataset

import trl_ext
from tests import tiny, tool_task
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.errors import DataError


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


class Away(tool_task.Adds):
    """An environment that rank 1 cannot reach."""

    def reset(self, **_) -> str:
        if torch.distributed.get_rank() == 1:
            raise OSError("the game server is away")
        return super().reset()


def train(folder) -> None:
    settings = dict(max_steps=1, max_completion_length=4, per_device_train_batch_size=8, shuffle_dataset=False)
    args = GRPOConfig(str(folder), **tiny.QUIET_ON_CPU, **settings)
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 8})
    for rows, rollouts in (
        (IterableDataset.from_generator(blank_on_rank_1), None),
        (prompts, short_on_rank_1),
        (prompts, None),
    ):
        options = dict(processing_class=tiny.tokenizer(), rollout_func=rollouts)
        try:
            GRPOTrainer(tiny.model("llama"), fails_on_rank_1, args, rows, **options).train()
        except DataError as error:
            print(f"rank {torch.distributed.get_rank()} refused: {error}")


def play(folder) -> None:
    rows = Dataset.from_dict({"level": list(range(16))})
    tool_task.trainer(trl_ext, str(folder), rows=rows, options=dict(environment_factory=Away)).train()
