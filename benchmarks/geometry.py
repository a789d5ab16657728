"""Drawn shapes with questions, and a small random model that sees: what the recipe geometry-grpo-cpu trains on.

    python -m benchmarks.geometry        prints the folder that holds `model` and `data`; makes it the first time

Each image shows a circle, a square or a triangle; each question asks for its colour or its size, in one word.
"""

import contextlib
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.quickstart.assets import build_once, cache_folder

KINDS, COLOURS, SIZES = ("circle", "square", "triangle"), ("red", "green", "blue"), ("big", "small")
SIDE, PATCH = 32, 4  # pixels: an image has 16 tokens
SPLITS = {"train": 1500, "test": 150}


def drawn(kind: str, colour: str, size: str, dice: random.Random) -> Any:
    """Return an image with one shape, anywhere on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    half = dice.randint(10, 13) if size == "big" else dice.randint(4, 6)
    x, y = dice.randint(half, SIDE - half), dice.randint(half, SIDE - half)
    left, top, right, bottom = box = (x - half, y - half, x + half, y + half)
    canvas = ImageDraw.Draw(image)
    if kind == "circle":
        canvas.ellipse(box, fill=colour)
    elif kind == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(x, top), (left, bottom), (right, bottom)], fill=colour)
    return image


def rows(count: int, seed: int) -> Any:
    """Return questions about shapes: prompt, image and answer."""
    from datasets import Dataset

    dice, found = random.Random(seed), []
    for _ in range(count):
        kind, colour, size = dice.choice(KINDS), dice.choice(COLOURS), dice.choice(SIZES)
        what, answer = dice.choice([("colour", colour), ("size", size)])
        prompt = [{"role": "user", "content": f"which {what}"}]
        found.append({"prompt": prompt, "image": drawn(kind, colour, size, dice), "answer": answer})
    return Dataset.from_list(found)


def model() -> tuple[Any, Any]:
    """Return a Qwen2.5-VL of two layers with random weights, and its processor."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

    from benchmarks import image_task

    words = {word: 7 + i for i, word in enumerate((*COLOURS, *SIZES, "which", "colour", "size"))}
    made = image_task.processor(words, PATCH)
    names = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.tokenizer._tokenizer, extra_special_tokens={"image_token": "<|image_pad|>"}, **names
    )
    # Without videos, so that it loads where torchvision is not installed.
    processor = PaddleOCRVLProcessor(made.image_processor, tokenizer, chat_template=image_task.TEMPLATE)
    torch.manual_seed(0)
    text = dict(vocab_size=7 + len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.05)
    text |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
    text |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=64, patch_size=PATCH)
    vision |= dict(window_size=4 * PATCH, fullatt_block_indexes=[1], initializer_range=0.05)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, initializer_range=0.05, **image_task.TOKENS)
    return Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32), processor


def prepare() -> Path:
    """Return the folder with `model` and `data`, built where they are missing."""
    folder = cache_folder().parent / "geometry"
    folder.mkdir(parents=True, exist_ok=True)
    build_once(folder / "model", _build_model)
    build_once(folder / "data", _build_data)
    return folder


def _build_model(folder: Path) -> None:
    for part in model():
        part.save_pretrained(folder)


def _build_data(folder: Path) -> None:
    for seed, (split, count) in enumerate(SPLITS.items()):
        rows(count, seed).to_parquet(folder / f"{split}.parquet")


def main() -> None:
    # Libraries print; only the path may reach stdout, which the shell captures.
    with contextlib.redirect_stdout(sys.stderr):
        folder = prepare()
    print(folder)


if __name__ == "__main__":
    main()
