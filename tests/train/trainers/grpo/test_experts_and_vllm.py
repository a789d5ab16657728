"""A mixture of experts whose samples come from vLLM says once, at the start, where to look; a dense model does not."""

import pytest

from tests import grpo_trainers, sampling_servers, tiny

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
