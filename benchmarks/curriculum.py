"""Does a curriculum learn in fewer steps than rows drawn alike? Sums of mixed difficulty, on one processor in minutes.

A small model is taught that + adds and - subtracts, and for each of eight letters to add in a share of the cases and
else to subtract. GRPO then pays for adding. Half of the rows are sums with + and -, which it solves; a quarter have a
letter, which is to be learned; a quarter are questions whose gold no completion gives. The score is the share of right
answers, by the model's probabilities, to sums with letters that no row holds. Settings take turns seed by seed; start,
rows, learning rate and completions a step are the same.

    python benchmarks/curriculum.py --output benchmarks/results/curriculum_cpu.json
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from machine import save
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trl_ext import GRPOConfig, GRPOTrainer

# Of each letter the share of cases in which the start adds.
LETTERS = dict(zip("abcdefgh", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8), strict=True))
PAIRS = [(a, b) for a in range(20, 40) for b in range(20)]
NUM_HELD_OUT, NUM_LETTER_ROWS = 50, 128
TAUGHT_STEPS = 4000
SCORES = (0.5, 0.6, 0.7, 0.8)
Sum = tuple[int, str, int]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", "+", "-", "=", "?", *LETTERS, *map(str, range(60))]
    fast = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def prompt(one: Sum) -> str:
    return "{} {} {} =".format(*one)


def taught(words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The start: a model of two layers, taught with the letters' shares for a minute."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=32, **sizes, **ends))
    optimizer, dice = torch.optim.AdamW(model.parameters()), random.Random(1)
    for step in range(TAUGHT_STEPS):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / TAUGHT_STEPS) + 1e-5
        texts = []
        for _ in range(256):
            (a, b), sign = dice.choice(PAIRS), dice.choice(["+", "-", *LETTERS])
            adds = dice.random() < LETTERS.get(sign, float(sign == "+"))
            texts.append(f"{prompt((a, sign, b))} {a + b if adds else a - b}")
        ids = words(texts, return_tensors="pt")["input_ids"]
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, -2], ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def rows_and_held_out() -> tuple[Dataset, list[Sum]]:
    """The training rows, and sums with letters of pairs that none of them has."""
    dice = random.Random(7)
    pairs = dice.sample(PAIRS, len(PAIRS))
    held_out = [(a, letter, b) for a, b in pairs[:NUM_HELD_OUT] for letter in LETTERS]

    def drawn(signs: str, number: int) -> list[Sum]:
        return [(a, signs[i % len(signs)], b) for i in range(number) for a, b in [dice.choice(pairs[NUM_HELD_OUT:])]]

    solvable = drawn("".join(LETTERS), NUM_LETTER_ROWS) + drawn("+-", 2 * NUM_LETTER_ROWS)
    rows = [(prompt(one), str(one[0] - one[2] if one[1] == "-" else one[0] + one[2])) for one in solvable]
    rows += [(prompt(one), "none") for one in drawn("?", NUM_LETTER_ROWS)]
    return Dataset.from_dict({"prompt": [row[0] for row in rows], "answer": [row[1] for row in rows]}), held_out


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == gold) for text, gold in zip(completions, answer, strict=True)]


class HeldOut(TrainerCallback):
    """Scores the model every few steps."""

    def __init__(self, words: PreTrainedTokenizerFast, sums: list[Sum], every: int):
        self._ids = words([prompt(one) for one in sums], return_tensors="pt")["input_ids"]
        self._golds = torch.tensor(words.convert_tokens_to_ids([str(one[0] + one[2]) for one in sums]))
        self._every, self.scores = every, {}

    @torch.no_grad()
    def score(self, step: int, model: Any) -> None:
        shares = model(self._ids).logits[:, -1].softmax(-1).gather(1, self._golds[:, None])
        self.scores[step] = round(shares.mean().item(), 4)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.score(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self.score(state.global_step, model)


def learned(start: str, curriculum: Any, seed: int, steps: int, learning_rate: float) -> dict[str, Any]:
    """Train once; return the held-out score by step, and the share of groups whose rewards differ."""
    words, (rows, held_out) = tokenizer(), rows_and_held_out()
    callback = HeldOut(words, held_out, every=5)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            seed=seed,
            curriculum=curriculum,
            learning_rate=learning_rate,
            max_steps=steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=1,
            **dict(lr_scheduler_type="constant", gradient_checkpointing=False, use_cpu=True, bf16=False),
            **dict(logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True),
        )
        model = LlamaForCausalLM.from_pretrained(start)
        trainer = GRPOTrainer(model, reward, args, rows, processing_class=words, callbacks=[callback])
        trainer.train()
    equal = [entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    return {"held_out": callback.scores, "teaching_groups": round(1 - statistics.mean(equal), 3)}


def steps_to(score: float, held_out: Mapping[int, float]) -> float | None:
    """Return the step at which a run first has the score, on straight lines between its evaluations."""
    for (before, low), (after, high) in pairwise(held_out.items()):
        if high >= score:
            return round(before + (after - before) * max(score - low, 0) / (high - low), 1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curriculum", nargs="+", default=['{"target": 0.5}'], help="settings compared with none")
    parser.add_argument("--seeds", type=int, default=4, help="seeds, from 42 on")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run, of 64 completions each")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, settings = [], {"uniform": None, **{text: json.loads(text) for text in options.curriculum}}
    with tempfile.TemporaryDirectory() as start:
        taught(tokenizer()).save_pretrained(start)
        for seed in range(42, 42 + options.seeds):
            for name, curriculum in settings.items():
                run = learned(start, curriculum, seed, options.steps, options.learning_rate)
                steps = {str(score): steps_to(score, run["held_out"]) for score in SCORES}
                run["held_out"] = {step: score for step, score in run["held_out"].items() if step % 25 == 0}
                runs.append({"seed": seed, "curriculum": name, **run, "steps": steps})
    ratios = report(runs, list(settings))
    given = dict(steps=options.steps, learning_rate=options.learning_rate)
    save(options.output, "curriculum", **given, runs=runs, ratios=ratios)


def report(runs: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float | None]]:
    """Print steps to each score, medians over seeds; return the median ratios of uniform's steps to a setting's."""
    table = Table(title="Optimizer steps to a held-out score, median over seeds (ratio: uniform's over these)")
    for column in ("curriculum", *map(str, SCORES), "groups that teach"):
        table.add_column(column, justify="right")
    of = {name: [run for run in runs if run["curriculum"] == name] for name in names}
    ratios: dict[str, dict[str, float | None]] = {}
    for name, mine in of.items():
        cells, ratios[name] = [], {}
        for score in map(str, SCORES):
            pairs = [
                (base["steps"][score], run["steps"][score]) for base, run in zip(of["uniform"], mine, strict=True)
            ]
            # A run that never got there counts as one that takes longer than any.
            inf = float("inf")
            median = statistics.median(inf if steps is None else steps for _, steps in pairs)
            both = [base / steps for base, steps in pairs if base and steps]
            ratios[name][score] = round(statistics.median(both), 2) if len(both) == len(pairs) else None
            cells.append(f"{median:.0f} ({ratios[name][score]})")
        share = statistics.mean(run["teaching_groups"] for run in mine)
        table.add_row(name, *cells, f"{share:.2f}")
    Console().print(table)
    return ratios


if __name__ == "__main__":
    main()
