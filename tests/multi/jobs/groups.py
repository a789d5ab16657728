"""Groups that lie across two ranks: replaced by spares, drawn by a curriculum, played in environments.

Completions depend on nothing but their prompt and their place in its group.
"""

import random

import trl_ext
from tests import grpo_trainers, tiny, tool_task
from tests.multi.jobs.shared import Rollout
from tests.train.trainers.grpo import test_curriculum, test_held_out_rewards, test_oversampling
from tests.train.trainers.test_served_environments import ROWS
from trl_ext.rewards.adapters.environments import EnvironmentReward, nemo_gym

# Ten rows are sampled on either rank, of which six are trained on.
SAMPLED, KEPT = (1, 0, 3, 2, 5, 6, 8, 7, 9, 10), (2, 0, 5, 6, 9, 7)
OVERSAMPLED = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, oversample=1.667)


def completion(prompt: str, sample: int, tokenizer) -> list[int]:
    dice = random.Random(f"{prompt} {sample}")
    return [dice.randrange(3, tiny.VOCAB) for _ in range(dice.randint(1, 12))]


rollouts = Rollout(completion, test_oversampling.SIZE)


def oversample(folder) -> dict:
    return trained(test_oversampling.made(trl_ext, folder, SAMPLED, rollouts=rollouts, **OVERSAMPLED))


def reward(prompts, completion_ids, **_) -> list[float]:
    return [
        float(sum(ids) % 2 if number % 4 == 3 else number % 4 != 2)
        for number, ids in zip((test_curriculum.NUMBERS[text] for text in prompts), completion_ids, strict=True)
    ]


def draw(folder, **changes) -> dict:
    """Rows of a curriculum, drawn by the rewards of both ranks."""
    trainer = test_curriculum.made(
        folder, rewards=reward, rollout_func=rollouts, max_steps=10, **OVERSAMPLED | changes
    )
    return trained(trainer)


def play(folder, url: str, batch: int) -> dict:
    """Two steps on sixteen rows a step, each rank with its own sessions on one server."""
    made = nemo_gym(url, turn_reward="reward")
    options = dict(per_device_train_batch_size=batch, rows=ROWS, packing=True)
    trainer = tool_task.trainer(trl_ext, str(folder), EnvironmentReward(), dict(environment_factory=made), **options)
    return trained(trainer)


def evaluate(folder, cases) -> list[dict]:
    """The log of an evaluation of each case: trainer, rows, batch and completions of a row."""
    made = (test_held_out_rewards.subject(*case[:1], folder / str(i), *case[1:]) for i, case in enumerate(cases))
    return [trainer.evaluate() for trainer in made]


def trained(trainer) -> dict:
    trainer.train()
    return {"weights": grpo_trainers.weights(trainer), "log": trainer.state.log_history}
