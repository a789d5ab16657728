"""How much less work is a generation by continuous batching where a group's prompt is read once? TRL against ours.

A model of SmolLM2-135M's shape with random weights; both trainers get the same rows, each prompt 8 times,
and generate them greedily with transformers' continuous batching. What is compared is processor time, which a busy
machine lengthens little, and the rows. Rounds alternate between the trainers.

    python benchmarks/continuous_batching.py --output benchmarks/results/continuous_batching_cpu.json
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import trl
from datasets import Dataset
from grpo_task import FIRST_WORD, reward, tokenizer
from machine import save
from transformers import AutoConfig, AutoModelForCausalLM

import trl_ext

ASKED = 3.0
VOCAB = 49152
GROUP = 8
LIBRARIES = {"trl": trl, "trl_ext": trl_ext}


def policy(layers: int) -> Any:
    """A model of random weights with the shape of SmolLM2-135M, or with fewer layers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def prompts(options: argparse.Namespace) -> list[str]:
    """Texts of as many tokens as the options say, each of other tokens."""
    torch.manual_seed(1)
    ids = torch.randint(FIRST_WORD, VOCAB, (options.groups, options.prompt))
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def generated(name: str, options: argparse.Namespace, completion: int) -> tuple[float, list[list[int]]]:
    """Return the processor seconds of one generation after one that warms up, and its completions."""
    library = LIBRARIES[name]
    texts = prompts(options)
    with tempfile.TemporaryDirectory() as folder:
        args = library.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.groups * GROUP,
            num_generations=GROUP,
            max_completion_length=completion,
            top_k=1,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 2048},
            use_cpu=not torch.cuda.is_available(),
            bf16=options.bf16,
            report_to="none",
        )
        subject = library.GRPOTrainer(
            policy(options.layers),
            reward,
            args,
            Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer(VOCAB),
        )
        subject.model.train()
        subject._generate(texts[:1] * 2)
        before = time.process_time()
        output = subject._generate([text for text in texts for _ in range(GROUP)])
        return time.process_time() - before, output[1]


def compared(options: argparse.Namespace, completion: int) -> dict[str, Any]:
    """Return the figures of completions of one length."""
    seconds = dict.fromkeys(LIBRARIES, 0.0)
    rows: dict[str, list[list[int]]] = {}
    for round_ in range(options.rounds):
        for name in LIBRARIES:
            spent, rows[name] = generated(name, options, completion)
            seconds[name] += spent
            print(f"{completion} tokens, round {round_ + 1}: {name} {spent:.1f} processor seconds", flush=True)
    return {
        "completion_tokens": completion,
        "processor_seconds": {name: round(value, 2) for name, value in seconds.items()},
        "ratio": round(seconds["trl"] / seconds["trl_ext"], 2),
        "rows": len(rows["trl"]),
        "equal_rows": sum(ours == theirs for ours, theirs in zip(rows["trl_ext"], rows["trl"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completions", type=int, nargs="+", default=[12, 24], help="tokens of the completions")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--bf16", action="store_true", help="generate in bf16, where rows may part by rounding")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    results = [compared(options, completion) for completion in options.completions]
    print(*results, sep="\n")
    save(
        options.output,
        "continuous_batching",
        model=f"SmolLM2-135M's shape, {options.layers} layers, random weights",
        dtype="bf16" if options.bf16 else "float32",
        shape=f"{options.groups} prompts of {options.prompt} tokens, {GROUP} completions each",
        asked=ASKED,
        results=results,
    )


if __name__ == "__main__":
    main()
