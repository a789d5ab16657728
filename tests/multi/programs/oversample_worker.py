"""Worker of test_oversampling_ranks: groups that lie across two ranks are replaced by spares.

Completions depend on nothing but their prompt and their place in its group. Ten rows are sampled on either rank, of
which six are trained on.
"""

import random
import sys

import torch

import trl_ext
from tests import tiny
from tests.train.trainers.grpo.test_oversampling import SIZE, made, weights

SAMPLED, KEPT = (1, 0, 3, 2, 5, 6, 8, 7, 9, 10), (2, 0, 5, 6, 9, 7)


def rollouts(prompts, trainer) -> dict:
    first = trainer.accelerator.process_index * len(prompts)
    dice = [random.Random(f"{text} {row % SIZE}") for row, text in enumerate(prompts, start=first)]
    return {
        "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in prompts],
        "completion_ids": [[one.randrange(3, tiny.VOCAB) for _ in range(one.randint(1, 12))] for one in dice],
        "logprobs": None,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    batch = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, oversample=1.667)
    trainer = made(trl_ext, sys.argv[1], SAMPLED, rollouts=rollouts, **batch)
    facts = {"weights": weights(trainer), "log": trainer.state.log_history}
    if trainer.accelerator.is_main_process:
        torch.save(facts, f"{sys.argv[1]}/facts.pt")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
