"""A small model of images and text, its processor, and prompts that show one image, for benchmarks and tests.

No processor of the Qwen families is made without torchvision, which their videos need; this one reads images alone.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

# The tokens about images; words follow.
PLACES = {"<|image_pad|>": 3, "<|video_pad|>": 4, "<|vision_start|>": 5, "<|vision_end|>": 6}
SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | PLACES
TOKENS = dict(image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %} {{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %} <|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Processor(ProcessorMixin):
    """Reads text and images as those of the Qwen families do: a placeholder token for each feature."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None):
        self.image_token = "<|image_pad|>"
        self.image_token_id, self.video_token_id = PLACES["<|image_pad|>"], PLACES["<|video_pad|>"]
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        size = self.image_processor.merge_size**2
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // size)


def processor(words: dict[str, int], patch_size: int) -> Processor:
    """Return a processor whose tokenizer knows these words beside those of `SPECIAL`."""
    fast = Tokenizer(models.WordLevel(SPECIAL | words, unk_token=next(iter(words))))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": list(PLACES)})
    sizes = dict(patch_size=patch_size, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=2**22)
    return Processor(Qwen2VLImageProcessorPil(**sizes), tokenizer, chat_template=TEMPLATE)


def model(vocab: int, layers: int, width: int, patch_size: int, vision_layers: int) -> Any:
    """Return a Qwen2.5-VL of random weights, the same in every call."""
    torch.manual_seed(0)
    head = 64
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // head,
            num_key_value_heads=max(width // (3 * head), 1),
            max_position_embeddings=8192,
            rope_parameters=rope,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        vision_config=dict(
            depth=vision_layers,
            hidden_size=width // 2,
            intermediate_size=width,
            num_heads=max(width // 2 // 48, 1),
            out_hidden_size=width,
            patch_size=patch_size,
            window_size=8 * patch_size,
            fullatt_block_indexes=[vision_layers - 1],
        ),
        **TOKENS,
    )
    return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
