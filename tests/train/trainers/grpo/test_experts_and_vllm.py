"""A mixture of experts whose samples come from vLLM says once, at the start, where to look; a dense model does not."""

import pytest

from tests import grpo_trainers, ppo_trainers, sampling_servers, tiny

SERVED = dict(use_vllm=True, vllm_mode="server", rollout_func=None, max_completion_length=3)


@pytest.mark.parametrize(
    ("family", "settings", "times"),
    [("qwen3_moe", SERVED, 1), ("gpt_oss", SERVED, 1), ("llama", SERVED, 0), ("qwen3_moe", {}, 0)],
    ids=["experts", "local experts", "dense", "without vLLM"],
)
def test_routers_that_may_differ_are_said(family, settings, times, tmp_path, monkeypatch, caplog):
    class Servers(sampling_servers.SamplingServers):
        policy_of = staticmethod(lambda: tiny.model(family))

    sampling_servers.install(monkeypatch, Servers)
    grpo_trainers.trainer(tmp_path, model=family, **settings)
    said = [one for one in caplog.messages if "vLLM may route tokens of this mixture of experts" in one]
    assert len(said) == times and all("vllm_importance_sampling_mode=token_truncate" in one for one in said)


def test_greedy_completions_of_a_group_are_asked_for_one_by_one(tmp_path, monkeypatch):
    """vLLM refuses several of a prompt; `num_generations_eval` is `num_generations` unless set."""
    sampling_servers.install(monkeypatch)
    settings = dict(eval_strategy="steps", eval_steps=1, eval_temperature=0.0, per_device_eval_batch_size=4)
    held_out = grpo_trainers.prompts().select(range(3))
    subject = grpo_trainers.trainer(tmp_path, **SERVED, max_steps=1, eval_dataset=held_out, **settings)
    subject.train()
    assert any("eval_reward" in entry for entry in subject.state.log_history)
    assert sampling_servers.SamplingServers.last.last_request["n"] == 1
    remax = dict(advantage_estimator="remax", num_generations=2, response_length=3, model=tiny.model("llama"))
    ppo_trainers.trainer(
        "none", tmp_path / "ppo", **remax, use_vllm=True, vllm_mode="server", rollout_func=None
    ).train()


def test_the_stop_token_of_ppo_is_the_only_end_of_vllms_completions(tmp_path, monkeypatch):
    sampling_servers.install(monkeypatch)
    served = dict(use_vllm=True, vllm_mode="server", rollout_func=None, model=tiny.model("llama"), max_steps=1)
    ppo_trainers.trainer("head", tmp_path, stop_token_id=50, response_length=3, **served).train()
    request = sampling_servers.SamplingServers.last.last_request
    assert request["stop_token_ids"] == [50] and request["ignore_eos"] is True
