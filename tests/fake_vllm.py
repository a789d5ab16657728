"""Stands in for vLLM, which no machine without a card can run: it takes the arguments of vLLM's documentation."""

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar


class FakeSamplingParams:
    """The parameters of vllm.SamplingParams that we give; docs.vllm.ai, vllm.sampling_params."""

    def __init__(
        self, *, n, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop_token_ids, ignore_eos, max_tokens
    ):
        assert min_p is not None and max_tokens > 0
        self.n, self.temperature, self.stop, self.ignore_eos = n, temperature, stop_token_ids, ignore_eos


class FakeLoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        assert lora_int_id > 0
        self.path = lora_path


class FakeLLM:
    """vllm.LLM: `answer` gives the token ids for a prompt's ids and the number of the sample."""

    made: ClassVar[list] = []
    answer: ClassVar = None

    def __init__(self, model, *, trust_remote_code=False, revision=None, enable_lora=False, max_lora_rank=16):
        assert max_lora_rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)
        self.made.append(dict(model=model, enable_lora=enable_lora, max_lora_rank=max_lora_rank, revision=revision))

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        self.made[-1]["lora"] = lora_request and lora_request.path
        assert sampling_params.stop == ([2] if not sampling_params.ignore_eos else [3])
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(token_ids=self.answer(prompt["prompt_token_ids"], number), finish_reason="stop")
                    for number in range(sampling_params.n)
                ]
            )
            for prompt in prompts
        ]


def echo(ids, number) -> list[int]:
    """Answer with the prompt's last token, then EOS."""
    return [ids[-1], 2]


def install(monkeypatch, answer=echo) -> list[dict]:
    """Put the stand-in in vLLM's place, and return what each `LLM` is made with."""
    import trl.trainer.grpo_trainer  # noqa: F401  while it can still see that vLLM is not there

    package, requests = ModuleType("vllm"), ModuleType("vllm.lora.request")
    package.LLM, package.SamplingParams = FakeLLM, FakeSamplingParams
    requests.LoRARequest = FakeLoRARequest
    FakeLLM.made.clear()
    FakeLLM.answer = staticmethod(answer)
    for name, module in (("vllm", package), ("vllm.lora", ModuleType("vllm.lora")), ("vllm.lora.request", requests)):
        monkeypatch.setitem(sys.modules, name, module)
    return FakeLLM.made
