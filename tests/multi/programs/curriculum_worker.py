"""Worker of test_curriculum_ranks: rows of groups that lie across two ranks are drawn by the rewards of both.

Completions and rewards depend on nothing but the prompt and the completion's place in its group.
"""

import sys

import torch

from tests.grpo_trainers import weights
from tests.multi.programs.oversample_worker import rollouts
from tests.train.trainers.grpo.test_curriculum import NUMBERS, made


def reward(prompts, completion_ids, **_) -> list[float]:
    return [
        float(sum(ids) % 2 if number % 4 == 3 else number % 4 != 2)
        for number, ids in zip((NUMBERS[text] for text in prompts), completion_ids, strict=True)
    ]


def trained(folder, **batch) -> dict:
    trainer = made(folder, rewards=reward, rollout_func=rollouts, oversample=1.667, max_steps=10, **batch)
    trainer.train()
    return {"weights": weights(trainer), "log": trainer.state.log_history, "rank": trainer.accelerator.process_index}


if __name__ == "__main__":
    torch.set_num_threads(1)
    facts = trained(sys.argv[1], per_device_train_batch_size=2, gradient_accumulation_steps=3)
    if facts["rank"] == 0:
        torch.save(facts, f"{sys.argv[1]}/facts.pt")
