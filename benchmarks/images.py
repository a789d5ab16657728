"""How much faster is GRPO's update on rows with images? Ours against trl.GRPOTrainer, same completions, one run.

A group of 8 completions looks at one image of about 1,000 tokens. TRL pads: its vision tower and its layers read the
image once a completion, here they read it once a group. Completions come from a fixed `rollout_func`. Rounds alternate
between the trainers, so that a busy machine hits both; the first step warms up. The image is cut into patches in
either trainer, which is in both figures.

    python benchmarks/images.py --output benchmarks/results/images_cpu.json
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import image_task
import torch
import transformers
import trl
from datasets import Dataset
from grpo_task import StepClock, reward
from machine import save
from PIL import Image

import trl_ext

ASKED_RATIO = 3.0
VOCAB, FIRST_WORD, PATCH = 8192, 7, 14
WORDS = {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}


def noise(side: int) -> Image.Image:
    return Image.frombytes("RGB", (side, side), random.Random(0).randbytes(3 * side * side))


def completions(options: argparse.Namespace):
    """A `rollout_func` of random tokens, whose lengths vary by a half around the mean."""

    def rollout(prompts, trainer):
        draw = random.Random(trainer.state.global_step)
        lengths = [draw.randint(options.mean // 2, options.mean * 3 // 2) for _ in prompts]
        ids = [[draw.randrange(FIRST_WORD, VOCAB) for _ in range(length)] for length in lengths]
        return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": ids, "logprobs": None}

    return rollout


def measured(library, options: argparse.Namespace, folder: str) -> tuple[float, int, int]:
    """Return seconds of the measured steps, patches through the vision tower in each, and image tokens."""
    args = library.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.generations,
        num_generations=options.generations,
        max_completion_length=options.mean * 2,
        max_steps=options.steps + 1,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"packing": True} if library is trl_ext else {}),
    )
    prompt = [{"role": "user", "content": " ".join(f"w{i}" for i in range(20, 40))}]
    side = options.tokens_a_side * 2 * PATCH
    clock = StepClock()
    subject = library.GRPOTrainer(
        image_task.model(VOCAB, options.layers, options.width, PATCH, options.vision_layers),
        reward,
        args,
        Dataset.from_dict({"prompt": [prompt] * 2, "images": [[noise(side)]] * 2}),
        processing_class=image_task.processor(WORDS, PATCH),
        rollout_func=completions(options),
        callbacks=[clock],
    )
    subject.remove_callback(transformers.PrinterCallback)
    patches: list[int] = []
    handle = subject.model.base_model.visual.register_forward_pre_hook(lambda _, given: patches.append(len(given[0])))
    subject.train()
    handle.remove()
    return sum(clock.seconds[1:]), sum(patches) // (options.steps + 1), options.tokens_a_side**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens_a_side", type=int, default=32, help="the image has so many squared tokens")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--mean", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vision_layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="measured steps of either trainer in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    seconds, patches, tokens = {trl: 0.0, trl_ext: 0.0}, {}, 0
    for _ in range(options.rounds):
        for library in (trl, trl_ext):
            with tempfile.TemporaryDirectory() as folder:
                took, patches[library], tokens = measured(library, options, folder)
            seconds[library] += took
            print(f"{library.__name__}: {took:.2f} s, {patches[library]} patches a step", flush=True)
    result = {
        "image_tokens": tokens,
        "generations": options.generations,
        "mean_completion": options.mean,
        "trl_s": round(seconds[trl], 2),
        "ours_s": round(seconds[trl_ext], 2),
        "ratio": round(seconds[trl] / seconds[trl_ext], 2),
        "asked_ratio": ASKED_RATIO,
        "trl_patches": patches[trl],
        "ours_patches": patches[trl_ext],
    }
    print(result)
    kind = f"Qwen2.5-VL, {options.layers} layers of width {options.width}, {options.vision_layers} of the tower, fp32"
    save(options.output, "images", model=kind, results=[result])


if __name__ == "__main__":
    main()
