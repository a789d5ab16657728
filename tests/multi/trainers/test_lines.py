"""Four processes that share rows of a model with 6 heads, in two lines, train what one does: PPO and Reward."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from tests.multi.conftest import with_score_head
from tests.multi.launching import PROGRAMS, facts_of, launched, run_worker, skip_what_cannot_run
from tests.multi.trainers.test_ppo_zero import TOLERANCE, run_of, saved_reward_adapter
from tests.multi.trainers.test_reward_zero import BUDGET, check_against
from tests.multi.warm import warm_python
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
    adapters = [saved_reward_adapter(policy, folder / str(seed), seed) for seed in (1, 2)]

    def runs(name, command, num_processes, *options):
        folder = tmp_path_factory.mktemp(name) / "out"
        models = ("--reward_model", scorer, "--reward_adapters", *adapters, "--critics", *CRITICS)
        facts = facts_of(PROGRAMS / "ppo_worker.py", command, policy, folder, num_processes, *models, *options)
        return {critic: run_of(folder, facts, critic) for critic in CRITICS}

    return runs


@pytest.fixture(scope="module")
def plain(ppo):
    return ppo("plain", [warm_python()], 1)


@pytest.mark.parametrize("name", daily(["cpu", "zero2", "zero3"]))
def test_ppo(name, plain, ppo):
    skip_what_cannot_run(name)
    shared = ppo(name, launched(name, 4), 4, "--packing", "--sequence_parallel", 4, "--accumulation", 1)
    for critic, run in shared.items():
        print(f"largest weight difference, {critic}: {run.distance(plain[critic]):.1e}")  # pytest -rP shows it
        assert run.distance(plain[critic]) <= TOLERANCE
        for ours, theirs in zip(run.facts["logs"], plain[critic].facts["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", daily(["cpu", "zero2"]))
def test_reward(name, scorer, tmp_path):
    skip_what_cannot_run(name)
    worker = PROGRAMS / "reward_worker.py"
    padded = run_worker(worker, [warm_python()], scorer, tmp_path / "padded", 1, "--library", "trl")
    options = ("--budget", BUDGET, "--sequence_parallel", 4)
    check_against(padded, run_worker(worker, launched(name, 4), scorer, tmp_path / "out", 4, *options))
