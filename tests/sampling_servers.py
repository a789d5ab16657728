"""Stands in for vLLM servers that sample by the weights that were pushed last, in this process, in plain code.

A draw depends on the weights, the prompt and the completion's place among those of its prompt, and on nothing else.
"""

import random
import threading
import time

import torch
from trl.generation import vllm_generation

from tests import tiny
from trl_ext.trainers.generation import vllm_servers


def sampled(model, prompt: list[int], place: int, most: int) -> tuple[list[int], list[float]]:
    """One completion with the log-probability of each of its tokens."""
    draw, ids, logps = random.Random(f"{prompt}/{place}"), [], []
    while len(ids) < most and ids[-1:] != [model.config.eos_token_id]:
        with torch.no_grad():
            given = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].log_softmax(-1)
        ids.append(draw.choices(range(len(given)), given.exp().tolist())[0])
        logps.append(given[ids[-1]].item())
    return ids, logps


class SamplingServers(vllm_servers.VLLMClients):
    """The client, with the servers inside.

    Attributes:
        policy_of: Makes the model that samples.
        seconds: That a generation takes longer.
        events: What the trainer asked for, in order, with how many of it.
    """

    policy_of, seconds = staticmethod(lambda: tiny.model("llama")), 0.0
    last = None  # the one that was made last

    def __init__(self, base_url, **kwargs):
        self.base_urls, self.base_url, self.model = [base_url], base_url, "tiny"
        self.policy, self.events, self.num_busy = self.policy_of().eval(), [], 0
        self._of_thread, self._lock = threading.local(), threading.Lock()
        SamplingServers.last = self

    def init_communicator(self, device=0):
        pass

    def is_up(self):
        return True

    close_communicator = reset_prefix_cache = lambda self: None

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params):
        assert not self.num_busy, "weights are pushed while completions are sampled"
        weights, number = dict(self.policy.named_parameters()), 0
        with torch.no_grad():
            for name, weight in named_params:  # one by one: TRL takes adapters out again after the last
                weights[name].copy_(weight)
                number += 1
        self.events.append(("push", number))

    def _post(self, url, json):
        if json["temperature"] < 1e-5 and json["n"] > 1:
            raise RuntimeError(f"n must be 1 when using greedy sampling, got {json['n']}.")  # vLLM's words
        self.last_request = json
        with self._lock:
            self.num_busy += 1
            self.events.append(("generate", len(json["prompt"])))
        time.sleep(self.seconds)
        choices = [self._choice(ids, place, json) for ids in json["prompt"] for place in range(json["n"])]
        with self._lock:
            self.num_busy -= 1
        return {"choices": choices}

    def _choice(self, prompt, place, asked):
        ids, logps = sampled(self.policy, prompt, place, asked["max_tokens"])
        names = [f"token_id:{i}" for i in ids]
        top = [{name: logp} for name, logp in zip(names, logps, strict=True)]
        return {
            "prompt_token_ids": prompt,
            "token_ids": ids,
            "logprobs": {"tokens": names, "token_logprobs": logps, "top_logprobs": top},
        }


class BehindServers(SamplingServers):
    """Servers that take weights in one push late: a trainer that waits samples as `generation_ahead: 1` does."""

    waiting = None

    def update_named_params(self, metadata, named_params):
        pushed = [(name, weight.clone()) for name, weight in named_params]
        super().update_named_params(metadata, pushed if self.waiting is None else self.waiting)
        self.waiting = pushed


def install(monkeypatch, servers=SamplingServers) -> type[SamplingServers]:
    """Let trainers with a vLLM server sample here."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *names, **versions: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", servers)
    monkeypatch.setattr(vllm_servers, "VLLMClients", servers)
    return servers
