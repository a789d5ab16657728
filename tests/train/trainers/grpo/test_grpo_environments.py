"""Environments that own the data: what TRL takes and trains, GRPOTrainer takes and trains to the same weights."""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout
from trl_ext.errors import DataError

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}{{ ' w3 ' if m['role'] == 'user' else ' w4 ' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} w4 {% endif %}"
)
CONVERSATIONS = {"prompt": [[{"role": "user", "content": tiny.words(i, 5)}] for i in range(3, 19)]}
WITHOUT_PROMPT = {"level": list(range(16))}


class Counting:
    """An environment with one tool, which scores what it was reset with."""

    def reset(self, level: int = 0, **_: Any) -> str:
        self.level = level
        return tiny.words(20 + level)

    def get_reward(self) -> float:
        Counting.calls += 1
        return (Counting.calls * 7 % 11) / 11

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        return tiny.words(number)

    calls = 0


@pytest.fixture(autouse=True)
def tools_without_a_real_template(monkeypatch):
    """Let a tiny chat template do, and no tool be called."""
    for name in ("supports_tool_calling", "is_chat_template_prefix_preserving"):
        monkeypatch.setattr(f"trl.trainer.grpo_trainer.{name}", lambda _: True)
    monkeypatch.setattr("trl.trainer.grpo_trainer.add_response_schema", lambda processor: processor)

    def no_calls(self, prompts, prompt_ids, completion_ids, completions, logprobs, *_):
        mask = [[1] * len(ids) for ids in completion_ids]
        return mask, completions, completion_ids, logprobs, 0, 0, [[] for _ in prompts]

    monkeypatch.setattr(trl.GRPOTrainer, "_tool_call_loop", no_calls)


def weights_after(library: Any, tmp_path: Any, rows: dict[str, list], **changes: Any) -> torch.Tensor:
    """All weights after one optimizer step."""
    Counting.calls = 0
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    settings = dict(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1)
    settings |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4)
    settings |= dict(max_completion_length=12, learning_rate=1e-3, adam_epsilon=1e-3, save_strategy="no", beta=0.0)
    trainer = library.GRPOTrainer(
        tiny.model("llama"),
        None,
        library.GRPOConfig(**settings, **changes),
        Dataset.from_dict(rows),
        processing_class=tokenizer,
        environment_factory=Counting,
        rollout_func=lambda prompts, trainer: rollout([prompt[-1]["content"] for prompt in prompts], trainer),
    )
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert (after - before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    return after


@pytest.mark.parametrize("rows", [CONVERSATIONS, WITHOUT_PROMPT], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("budget", [{}, {"max_tokens_per_forward": 32}], ids=["no budget", "budget"])
def test_a_step_is_trls_with_an_environment(rows, budget, tmp_path):
    ours = weights_after(trl_ext, tmp_path, rows, packing=True, **budget)
    theirs = weights_after(trl, tmp_path, rows)
    assert (ours - theirs).abs().max() <= 1e-6


def test_rows_without_a_prompt_and_without_an_environment_are_refused(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt'"):
        trl_ext.GRPOTrainer(
            tiny.model("llama"),
            lambda completions, **_: [0.0] * len(completions),
            trl_ext.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False),
            Dataset.from_dict(WITHOUT_PROMPT),
            processing_class=tiny.tokenizer(),
        )
