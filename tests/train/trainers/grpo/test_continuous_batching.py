"""Generation by transformers' continuous batching: trains packed what TRL trains, and leaves the weights' dtypes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

# By default the cache takes half of the memory that is free, and filling that takes a minute.
SMALL_CACHE = {"num_blocks": 8, "max_batch_tokens": 64, "page_size": 32}
PROMPTS = Dataset.from_dict({"prompt": [tiny.words(*range(3, 3 + length)) for length in (9, 1, 4, 7)]})


def reward(completion_ids, **_):
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def trained(library: Any, folder: Path, **changes: Any) -> Any:
    settings = dict(
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # as in test_grpo_step
        save_strategy="no",
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=SMALL_CACHE,
    )
    subject = library.GRPOTrainer(
        tiny.model("llama", num_hidden_layers=2),
        reward,
        library.GRPOConfig(str(folder), **(tiny.QUIET_ON_CPU | settings | changes)),
        PROMPTS,
        processing_class=tiny.tokenizer(),
    )
    subject.train()
    return subject


def weights(subject: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in subject.model.parameters()])


def test_what_continuous_batching_generates_is_trained_packed_and_as_trl_trains_it(tmp_path):
    ours = trained(trl_ext, tmp_path / "ours", packing=True)
    theirs = trained(trl, tmp_path / "theirs")
    assert ours._packs
    assert ours.model.config._attn_implementation == "sdpa"
    before = torch.cat([p.detach().flatten() for p in tiny.model("llama", num_hidden_layers=2).parameters()])
    assert (weights(ours) - before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    assert (weights(ours) - weights(theirs)).abs().max() <= 1e-6


def test_weights_in_float32_and_rotary_frequencies_stay_so_under_bf16(tmp_path):
    """TRL casts the model for generation and leaves it so, which small updates do not survive."""
    subject = trained(trl_ext, tmp_path, bf16=True)
    assert {p.dtype for p in subject.model.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in subject.model.buffers()} == {torch.float32}


def test_a_penalty_that_transformers_would_drop_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="repetition_penalty"):
        trl_ext.GRPOConfig(
            str(tmp_path), **tiny.QUIET_ON_CPU, use_transformers_continuous_batching=True, repetition_penalty=1.2
        )
