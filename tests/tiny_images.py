"""Tiny models of images and text, their processor and rows, for tests that need no download."""

import random
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from benchmarks import image_task
from benchmarks.image_task import Processor
from tests import tiny

IMAGE = image_task.TOKENS["image_token_id"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
_TEXT = dict(vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
_TEXT |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, rope_parameters=_ROPE)
_TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_VISION = dict(depth=2, num_heads=2, hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=4)
_VISION |= dict(spatial_merge_size=2, temporal_patch_size=2)
_GATED = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
# What each family has beside these: of its text, and of its vision tower.
FAMILIES = {
    "qwen2_vl": ({}, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": ({}, {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({}, {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}),
    "qwen3_5": ({**_GATED, "num_hidden_layers": 4}, {"num_position_embeddings": 64}),
}


def processor() -> Processor:
    return image_task.processor({f"w{i}": i for i in range(7, tiny.VOCAB)}, patch_size=4)


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of the family in float32; `changes` of its text."""
    torch.manual_seed(seed)
    text, vision = FAMILIES[family]
    config = CONFIG_MAPPING[family](
        text_config=_TEXT | text | changes, vision_config=_VISION | vision, **image_task.TOKENS
    )
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for parameter, values in made.named_parameters():
        if parameter.endswith("dt_bias"):  # a state that lasts, as in trained models
            values.data.fill_(-4.0)
    return made


def image(seed: int, width: int = 16, height: int = 16) -> Image.Image:
    draw = random.Random(seed)
    return Image.frombytes("RGB", (width, height), bytes(draw.randrange(256) for _ in range(3 * width * height)))


def rows(shown: list[list[Image.Image]], text: str = "w9 w10 w11") -> Dataset:
    """Rows of one text, each with its images."""
    prompts = [[{"role": "user", "content": text}]] * len(shown)
    return Dataset.from_dict({"prompt": prompts, "images": shown})


def completions(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Fixed ragged completions in the place of sampled ones: a function of the place in the batch."""
    prompt_ids, *_ = trainer._tokenize_prompts(prompts)
    completion_ids = []
    for place in range(len(prompts)):
        draw = random.Random(place)
        completion_ids.append([draw.randrange(7, tiny.VOCAB) for _ in range(draw.choice([1, 3, 4, 9, 12]))])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}
