"""Stand-ins for what surrounds TRL's AsyncGRPOTrainer: the child that rolls out and scores, and the push to vLLM.

Completions come when the trainer asks for one, in this process, by the weights that were pushed last.
"""

import queue

import numpy as np
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import trl_ext
from tests import tiny
from tests.sampling_servers import sampled

NUM_GENERATIONS, MOST_TOKENS = 4, 6
PROMPTS = [[5, 9, 11], [7, 8, 9, 10, 12, 5, 9], [30, 31], [44, 8, 60, 3, 5]]


class Server:
    """The policy that samples, which takes pushed weights; `loses` names the pushes that do not arrive, from 1 on."""

    def __init__(self, model, loses=lambda number: False):
        self.policy, self.loses, self.num_pushes = model.eval(), loses, 0

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        self.num_pushes += 1
        pushed = {name: weight.clone() for name, weight in iterator}
        if not self.loses(self.num_pushes):
            self.policy.load_state_dict(pushed, strict=False)


class Rollouts:
    """A rollout worker whose queue rolls out a group where it is empty."""

    def __init__(self, server, reward):
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.server, self.reward = server, reward
        self.version, self.num_groups, self.waiting = 0, 0, []

    def start(self):
        assert self.server.num_pushes == 1, "weights come before the first rollout"

    def stop(self):
        pass

    def update_model_version(self, model_version):
        self.version = model_version

    def check_health(self, stale_after_s):
        pass

    def qsize(self):
        return len(self.waiting)

    def get(self, timeout):
        if not self.waiting:
            self._roll_out(PROMPTS[self.num_groups % len(PROMPTS)])
        return self.waiting.pop(0)

    def _roll_out(self, prompt):
        places = range(self.num_groups * NUM_GENERATIONS, (self.num_groups + 1) * NUM_GENERATIONS)
        rows = [sampled(self.server.policy, prompt, place, MOST_TOKENS) for place in places]
        texts = [[{"role": "assistant", "content": " ".join(map(str, ids))}] for ids, _ in rows]
        rewards = self.reward(texts, [ids for ids, _ in rows])
        for (ids, logps), text, reward in zip(rows, texts, rewards, strict=True):
            self.waiting.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": str(prompt)}],
                    completion=text,
                    input_ids=np.array([*prompt, *ids]),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(ids)),
                    old_log_probs=np.array([0.0] * len(prompt) + logps, dtype=np.float32),
                    advantage=reward - sum(rewards) / len(rewards),
                    model_version=self.version,
                    group_id=self.num_groups,
                    metrics={"reward": reward, "reward_std": float(np.std(rewards)), "rewards/length": reward},
                )
            )
        self.num_groups += 1


def spread(_, completion_ids):
    """Any fixed reward that differs within a group."""
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def trainer(
    folder, library=trl_ext, family="llama", server=None, dtype=torch.float32, reward=spread, model=None, **changes
):
    """A trainer on a model, a tiny one unless given, with stand-ins; `library` may be TRL's module."""
    model = tiny.model(family).to(dtype) if model is None else model
    model.save_pretrained(folder / "model")
    server = server or Server(model)
    settings = dict(
        **tiny.QUIET_ON_CPU,
        max_steps=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=NUM_GENERATIONS,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        token_budget=0,
        dtype=str(dtype).removeprefix("torch."),
    )
    return library.AsyncGRPOTrainer(
        str(folder / "model"),
        spread,
        AsyncGRPOConfig(str(folder / "run"), **settings | changes),
        Dataset.from_dict({"prompt": [tiny.words(*ids) for ids in PROMPTS] * 8}),
        processing_class=tiny.tokenizer(),
        rollout_worker=Rollouts(server, reward),
        weight_transfer=server,
    )
