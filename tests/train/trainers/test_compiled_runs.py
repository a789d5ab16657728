"""`torch_compile` in a run whose rows have many lengths: nothing is compiled for each of them, then given up."""

from collections.abc import Iterator

import pytest
import torch

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.nightly import nightly
from tests.preferences import pairs

COMPILED = dict(torch_compile=True, torch_compile_backend="eager", max_steps=10)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    # As an error, not as a warning that is printed once. The limit is twice torch's: a decorator of transformers has
    # one code for all functions that it wraps, each of which counts; lengths of rows would reach any limit.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=16):
        yield
    torch._dynamo.reset()


def grpo(folder, **changes):
    return grpo_trainers.trainer(folder, model=tiny.model("llama", num_hidden_layers=1), **changes)


def ppo(folder, **changes):
    return ppo_trainers.trainer("head", folder, model=tiny.model("llama", num_hidden_layers=1), **changes)


def reward(folder, **changes):
    return reward_trainers.trainer(folder, pairs(80), **changes)


@pytest.mark.parametrize("made", [grpo, nightly(ppo), nightly(reward)])
def test_steps_stay_compiled(made, tmp_path):
    subject = made(tmp_path, **COMPILED)
    subject.train()
    assert subject._packs and subject.state.global_step == 10
