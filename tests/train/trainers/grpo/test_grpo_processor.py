"""A checkpoint with a processor: packed on text; of families whose images are not packed, left to TRL."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, Image, IterableDataset
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, ProcessorMixin

import trl_ext
from tests import grpo_trainers, tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, weights
from tests.rollouts import rollout
from trl_ext.errors import ConfigError
from trl_ext.trainers.rows.prompts import may_hold_images

_QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TEXT = {"qwen2_vl": _QWEN, "gemma3": {"sliding_window": 7, "query_pre_attn_scalar": 16}}
VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
    "gemma3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"image_size": 28, "patch_size": 14},
}
MESSAGES = [[{"role": "user", "content": "w5"}]] * 4
PARTS = [[{"role": "user", "content": [{"type": "text", "text": "w5"}]}]] * 4
PARTS_WITH_IMAGE = [[{"role": "user", "content": [{"type": "image", "text": None, "image": "a.png"}]}]] * 4


class Processor(ProcessorMixin):
    """A tokenizer in the place of an image and text processor."""

    def __init__(self, tokenizer: Any = None, chat_template: str | None = None):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, text: Any = None, **options: Any) -> Any:
        return self.tokenizer(text, **options)


def model(family: str) -> Any:
    """A tiny model of images and text."""
    torch.manual_seed(0)
    text = {**tiny.model("llama").config.to_dict(), "model_type": f"{family}_text", **TEXT[family]}
    config = CONFIG_MAPPING[family](text_config=text, vision_config=VISION[family], image_token_id=3)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def sampled(prompts, trainer):
    return rollout(prompts, SimpleNamespace(processing_class=trainer.processing_class.tokenizer))


def trainer(folder, library=trl_ext, family="qwen2_vl", **changes):
    options = dict(processing_class=Processor(tiny.tokenizer()), rollout_func=sampled, gradient_accumulation_steps=2)
    return grpo_trainers.trainer(folder, library, model(family), **options | changes)


@pytest.mark.parametrize("family", TEXT)
def test_text_is_packed_and_a_step_is_trls(family, tmp_path):
    found = []
    for subject in (trainer(tmp_path, trl_ext, family, packing=True), trainer(tmp_path, trl, family)):
        subject.before = weights(subject)
        subject.train()
        found.append(learned(subject))
    assert (found[0] - found[1]).abs().max() <= WEIGHT_TOLERANCE


WITH_IMAGES = Dataset.from_dict({"prompt": ["w5"] * 8, "image": [None] * 8})


def test_rows_whose_images_see_both_ways_are_not_packed(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.base.packing.logger.warning", said.append)
    subject = trainer(tmp_path, family="gemma3", data=WITH_IMAGES)
    assert not subject._packs
    assert "may bring images, which may see their own tokens in both directions" in said[0]


def test_a_budget_that_padded_images_would_ignore_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_tokens_per_forward=64 cannot cut a micro-batch: rows may hold images"):
        trainer(tmp_path, family="gemma3", data=WITH_IMAGES, max_tokens_per_forward=64)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": ["w5"] * 4}, False),
        ({"prompt": MESSAGES}, False),
        ({"prompt": PARTS}, False),
        ({"environment": ["a"] * 4}, False),
        ({"prompt": PARTS_WITH_IMAGE}, True),
        ({"prompt": ["w5"] * 4, "images": [[]] * 4}, True),
    ],
    ids=["text", "messages", "parts", "no prompt", "image in a part", "column of images"],
)
def test_columns_tell_whether_rows_may_hold_images(columns, expected):
    assert may_hold_images(Dataset.from_dict(columns)) is expected


def test_rows_that_nobody_knows_before_the_run_may_hold_images():
    rows = Dataset.from_dict({"prompt": ["w5"] * 4})
    assert may_hold_images(IterableDataset.from_generator(lambda: iter([{"prompt": "w5"}])))
    assert not may_hold_images(rows.to_iterable_dataset())
    assert may_hold_images(rows.with_transform(lambda batch: batch))
    assert may_hold_images(Dataset.from_dict({"prompt": [None]}).cast_column("prompt", Image()))
