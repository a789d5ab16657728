"""Stands in for what TRL's AsyncGRPOTrainer needs of vLLM and aiohttp, so that its child process starts here.

TRL's rollout loop runs unchanged, in the child that TRL spawns, but for the POST to the server, which `ServedLoop`
answers itself. Of aiohttp the loop then uses names alone.
"""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from trl_ext.trainers.async_grpo import trainer


@asynccontextmanager
async def _session(connector):
    yield None


if not async_rollout_worker.is_aiohttp_available():
    async_rollout_worker._RETRYABLE_HTTP_ERRORS = (OSError,)
    async_rollout_worker.aiohttp = SimpleNamespace(
        ClientSession=_session, TCPConnector=lambda limit: None, ClientTimeout=lambda total: None
    )


class ServedLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's loop with the server's answers: the last two tokens of the vocabulary, in turn, each as a completion."""

    num_answers = 0

    async def _post(self, path, payload, timeout, max_retries=3):
        self.num_answers += 1
        token = len(self.tokenizer) - 1 - self.num_answers % 2
        return {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [-1.0]}}]}


class NoTransfer:
    """A weight transfer that goes nowhere."""

    def __init__(self, **settings):
        pass

    def __getattr__(self, name):
        return lambda *arguments: None

    def send_weights(self, iterator):
        list(iterator)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let TRL's trainer start its child without vLLM and aiohttp."""
    for name in ("is_vllm_available", "is_aiohttp_available"):
        patch.setattr(async_rollout_worker, name, lambda: True)
    patch.setattr(async_rollout_worker.AsyncRolloutWorker, "_loop_cls", ServedLoop)
    patch.setattr(async_grpo_trainer, "WeightTransferClient", NoTransfer)
    patch.setattr(async_grpo_trainer.VLLMClient, "wait_for_server_ready", lambda client: None)
    patch.setattr(async_grpo_trainer.VLLMClient, "get_max_model_len", lambda client: 512)
    patch.setattr(trainer, "find_spec", lambda name: name)


if __name__ == "<run_path>":  # as RUN_FIRST, in a launched script
    from tests.async_server import install as install_for_good

    install_for_good(pytest.MonkeyPatch())
