"""Four processes that share rows of a model with 6 heads, in two lines, train what one does: PPO and Reward."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from tests.multi.conftest import with_score_head
from tests.multi.launching import run_job, skip_what_cannot_run
from tests.multi.trainers.test_ppo_zero import TOLERANCE, saved_reward_adapter
from tests.multi.trainers.test_reward_zero import BOUNDED, check_against
from tests.nightly import daily

CRITICS = ["head", "adapter", "separate"]


@pytest.fixture(scope="module")
def policy(tiny_model, tmp_path_factory) -> Path:
    """The tiny Llama with 6 query heads and 3 key heads."""
    folder = tmp_path_factory.mktemp("policy")
    heads = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=16, hidden_size=96)
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model, **heads)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scorer(policy, tmp_path_factory) -> Path:
    """The same with a random score head."""
    return with_score_head(policy, tmp_path_factory.mktemp("scorer"))


@pytest.fixture(scope="module")
def ppo(policy, scorer, tmp_path_factory):
    """Starts PPO with every critic, and returns its runs by critic."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [str(saved_reward_adapter(policy, folder / str(seed), seed)) for seed in (1, 2)]
    models = dict(model=policy, reward_model=scorer, adapters=adapters, critics=CRITICS)

    def runs(launch, **options):
        run = run_job("ppo", launch, tmp_path_factory.mktemp("ppo"), 4, **models, **options)
        return {critic: run.part(critic) for critic in CRITICS}

    return runs


@pytest.fixture(scope="module")
def plain(ppo):
    return ppo(None)


@pytest.mark.parametrize("name", daily(["cpu", "zero2", "zero3"]))
def test_ppo(name, plain, ppo):
    skip_what_cannot_run(name)
    shared = ppo(name, packing=True, sequence_parallel=4, accumulation=1)
    for critic, run in shared.items():
        print(f"largest weight difference, {critic}: {run.distance(plain[critic]):.1e}")  # pytest -rP shows it
        assert run.distance(plain[critic]) <= TOLERANCE
        for ours, theirs in zip(run.facts["logs"], plain[critic].facts["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", daily(["cpu", "zero2"]))
def test_reward(name, scorer, tmp_path):
    skip_what_cannot_run(name)
    padded = run_job("reward", None, tmp_path / "padded", model=scorer, library="trl")
    check_against(padded, run_job("reward", name, tmp_path / "out", 4, model=scorer, sequence_parallel=4, **BOUNDED))
