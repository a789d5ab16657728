"""With `generation_ahead: 1` a block trains on samples of the weights one block before, corrected by TRL's ratios."""

import asyncio
from dataclasses import dataclass

import pytest
import torch
import trl
from datasets import Dataset
from trl.generation.vllm_client import VLLMClient

import trl_ext
from tests import grpo_trainers, sampling_servers, tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE, prompts, reward
from tests.nightly import daily, nightly
from trl_ext.errors import ConfigError
from trl_ext.rewards import Length, RuleSet, Verdict
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.scripts.grpo import make_parser
from trl_ext.trainers.generation.ahead import GenerationAhead
from trl_ext.trainers.generation.early import EarlyScoring

torch.set_num_threads(1)

SETTINGS = dict(
    max_steps=4,
    gradient_accumulation_steps=2,
    max_completion_length=6,
    learning_rate=1e-2,
    use_vllm=True,
    vllm_mode="server",
    rollout_func=None,
)
# The first one is TRL's default.
TRL_MODES = ("sequence_mask", "token_mask")


@pytest.fixture
def servers(monkeypatch):
    return sampling_servers.install(monkeypatch)


def made(library, folder, rules=reward, **changes):
    return grpo_trainers.trainer(folder, library, rewards=rules, **SETTINGS | changes)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "changes",
    [
        nightly({}),
        dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2),
        nightly(dict(steps_per_generation=4)),
    ],
    ids=str,
)
def test_weights_are_those_of_a_replay_with_samples_of_the_block_before(changes, servers, tmp_path, monkeypatch):
    ours = made(trl_ext, tmp_path, generation_ahead=1, **changes)
    ours.train()
    correction = dict(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
    plain = made(trl_ext, tmp_path, **changes, **correction)
    plain.train()
    sampling_servers.install(monkeypatch, sampling_servers.BehindServers)
    theirs = made(trl, tmp_path, **changes, **correction)
    theirs.train()
    assert (weights(ours.model) - weights(theirs.model)).abs().max() <= WEIGHT_TOLERANCE
    assert (weights(plain.model) - weights(theirs.model)).abs().max() > 100 * WEIGHT_TOLERANCE


def test_next_block_is_asked_for_before_this_one_trains(servers, tmp_path):
    trainer = made(trl_ext, tmp_path, generation_ahead=1)
    trainer.train()
    numbers = {"push": "p", "generate": "g"}
    # The first block at once, and each of the others one by one: two prompts each.
    assert "".join(numbers[kind] for kind, _ in servers.last.events) == "pg" + "ggp" * 3
    assert [e["sampling/steps_behind"] for e in trainer.state.log_history[:4]] == [0.0, 1.0, 1.0, 1.0]


def test_a_run_of_one_block_is_refused(servers, tmp_path):
    with pytest.raises(ConfigError, match="two blocks"):
        made(trl_ext, tmp_path, generation_ahead=1, max_steps=1)


def test_samples_that_cannot_be_known_ahead_are_refused(subtests, servers, tmp_path):
    for changes, reason in (
        (dict(rollout_func=grpo_trainers.rollout), "a rollout_func, which generates by itself"),
        (dict(data=prompts().to_iterable_dataset()), "a streamed dataset, whose rows have no numbers"),
    ):
        with subtests.test(reason), pytest.raises(ConfigError, match=f"=1 does not work with {reason}"):
            made(trl_ext, tmp_path, generation_ahead=1, **changes)


@pytest.mark.parametrize("urls", ["http://127.0.0.1:8000,http://127.0.0.1:8000", "http://127.0.0.1:8000,"])
def test_servers_of_one_address_are_refused(urls, servers, tmp_path):
    with pytest.raises(ConfigError, match=f"vllm_server_base_url is '{urls}'. Write different addresses"):
        made(trl_ext, tmp_path, vllm_server_base_url=urls)


@dataclass(frozen=True, kw_only=True)
class SlowJudge(AsyncRule):
    """Pays by the length of the text, after a while."""

    seconds: float = 0.05
    concurrency: int = 8

    async def score(self, row):
        CALLS.append(row.text)
        await asyncio.sleep(self.seconds)
        return Verdict(len(row.text) % 17 / 17)


CALLS = []


@pytest.mark.parametrize("conversational", [False, True])
def test_rules_judge_completions_as_they_come_and_each_once(conversational, servers, tmp_path, monkeypatch):
    CALLS.clear()
    rules = RuleSet([SlowJudge(name="judge"), Length(high=4, slack=2)])
    trainer = made(trl_ext, tmp_path, rules=rules, generation_ahead=1, max_steps=3)
    if conversational:
        trainer.processing_class.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        messages = [[{"role": "user", "content": row["prompt"]}] for row in trainer.train_dataset]
        trainer.train_dataset = Dataset.from_dict({"prompt": messages})
    early, begin = [], RuleSet.begin

    def noted(rules, *given, **columns):
        early.append(given)
        return begin(rules, *given, **columns)

    order, ask, remember = [], GenerationAhead._ask, EarlyScoring.remember
    monkeypatch.setattr(RuleSet, "begin", noted)
    monkeypatch.setattr(GenerationAhead, "_ask", lambda *given: (order.append("ask"), ask(*given)))
    monkeypatch.setattr(EarlyScoring, "remember", lambda scoring: (order.append("remember"), remember(scoring)))
    trainer.train()
    # The servers have the next prompts before this process waits for verdicts.
    assert order == ["ask", "ask", "remember", "ask", "remember"]
    assert len(early) == 2 * 2  # two prompts of each block but the first
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    calls = [entry["rules/judge/calls"] for entry in log]
    assert sum(calls) == len(CALLS) and min(calls) >= 6  # equal completions of a prompt are judged once
    hits = [entry.get("rules/judge/cache_frac", 0.0) for entry in log]
    assert hits == pytest.approx([1 - number / 8 for number in calls])


def test_metrics_say_how_far_the_samples_are_from_the_policy(servers, tmp_path):
    trainer = made(trl_ext, tmp_path, generation_ahead=1, learning_rate=1e-1)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[0]["sampling/effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
    assert all(0 < entry["sampling/effective_sample_size"] < 0.999 for entry in log[2:])
    assert all(0 <= entry["sampling/truncated_frac"] < 1 for entry in log)
    assert all(entry["sampling/generation_s"] > 0 for entry in log[1:])


@pytest.mark.parametrize("step", daily([1, 2, 3], 2))
def test_a_resumed_run_ends_with_the_same_bits(step, servers, tmp_path):
    changes = dict(generation_ahead=1, save_strategy="steps", save_steps=1)
    whole = made(trl_ext, tmp_path / "whole", **changes)
    whole.train()
    again = made(trl_ext, tmp_path / "again", **changes)
    again.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert torch.equal(weights(again.model), weights(whole.model))
    # The block of the step after is in the checkpoint, and asked for by nobody.
    assert sum(kind == "generate" for kind, _ in servers.last.events) == 2 * (4 - step - 1)


def test_an_evaluation_waits_and_takes_nothing_that_was_asked_for_ahead(servers, tmp_path):
    plain = made(trl_ext, tmp_path / "plain", generation_ahead=1)
    plain.train()
    changes = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    evaluated = made(trl_ext, tmp_path / "eval", generation_ahead=1, eval_dataset=prompts(), **changes)
    evaluated.train()
    # TRL shuffles rows by the random numbers that an evaluation uses, too.
    assert (weights(evaluated.model) - weights(plain.model)).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("words", [(), *[("--vllm_importance_sampling_mode", mode) for mode in TRL_MODES]], ids=str)
def test_a_mode_that_is_given_stays_also_where_it_is_trls_default(words, servers, tmp_path):
    line = "--use_vllm true --vllm_mode server --generation_ahead 1 --max_steps 4 --use_cpu true --bf16 false"
    _, args, *_ = make_parser().parse(["--output_dir", str(tmp_path), *line.split(), *words])
    trainer = trl_ext.GRPOTrainer(tiny.model("llama"), reward, args, prompts(), processing_class=tiny.tokenizer())
    assert trainer.vllm_importance_sampling_mode == (words[1] if words else "token_truncate")
    assert trainer.args.vllm_importance_sampling_clip_max == (3.0 if words else 2.0)


def test_servers_of_another_model_refuse_the_weights_in_a_sentence(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "policy_of", staticmethod(lambda: tiny.model("qwen3_moe")))
    monkeypatch.setattr(VLLMClient, "update_named_params", servers.update_named_params)
    monkeypatch.delattr(servers, "update_named_params")
    monkeypatch.setattr(servers, "_starts", "", raising=False)
    with pytest.raises(ConfigError, match="refused this run's weights, and serves tiny"):
        made(trl_ext, tmp_path, generation_ahead=1).train()
