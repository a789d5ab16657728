"""Random numbers are TRL's until the first update: completions of a dropout model, and no draw by a check."""

import random

import numpy as np
import pytest
import torch
import trl
from peft import LoraConfig
from transformers import set_seed

import trl_ext
from tests import grpo_trainers, tiny

# By name: what makes a forward in training draw random numbers.
DRAWING = {
    "dropout": dict(peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05)),
    "NEFTune": dict(neftune_noise_alpha=5.0),
}


@pytest.mark.parametrize("way", DRAWING)
def test_the_first_completions_are_trls_where_forwards_draw_random_numbers(way, tmp_path):
    def first(library):
        seen = []

        def reward(completion_ids, **_):
            seen.append([list(ids) for ids in completion_ids])
            return [1.0] * len(completion_ids)

        changes = dict(rewards=reward, rollout_func=None, max_steps=1, beta=0.1, num_generations=8)
        set_seed(3)
        grpo_trainers.trained(tmp_path, library, per_device_train_batch_size=8, **changes, **DRAWING[way])
        return seen

    assert first(trl_ext) == first(trl)


@pytest.mark.own_self_check
def test_checks_leave_the_random_numbers_of_a_run_alone(tmp_path):
    model = tiny.model("llama")
    calls = []

    def draw(*_):
        calls.append([random.random(), np.random.rand(), torch.rand(1)])

    model.get_input_embeddings().register_forward_hook(draw)

    def state(library):
        set_seed(3)
        grpo_trainers.trainer(tmp_path, library, model=model)
        return random.random(), np.random.rand(), torch.rand(1).item()

    theirs = state(trl)
    assert not calls
    assert state(trl_ext) == theirs
    assert calls
