"""Held-out accuracy against episodes: PPO, REINFORCE++, RLOO and GRPO on the quickstart's sums, equal episodes, seeds.

The policy is a small Llama that reads characters. Before the runs it learns all 200 sums by supervised training on
answers of which a share RIGHT is right and the others are drawn at random: like the quickstart's model, it half knows
them. Reinforcement then sees the training problems alone. Accuracy is that of answers sampled at temperature 1, and
exact: the mean probability of the right answer with the end after it, over the 64 held-out problems.

    python benchmarks/family.py --output benchmarks/results/family_cpu.json
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from datasets import Dataset
from machine import machine, write
from peft import LoraConfig
from quickstart.assets import prepare
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import trl_ext
from trl_ext.rewards import Answer

CHARACTERS = ["<pad>", "<unk>", "<end>", *"0123456789+-= "]
RIGHT = 0.3  # of the answers of the supervised training
BATCH = 64  # episodes of an update: 8 problems x 8 completions, in 2 optimizer steps, as the recipe `ppo`
METHODS = {
    "PPO": dict(advantage_estimator="gae", critic="adapter", vf_coef=0.5, value_learning_rate=5e-3),
    "REINFORCE++": dict(advantage_estimator="reinforce_pp"),
    "RLOO": dict(advantage_estimator="rloo"),
    "GRPO": dict(advantage_estimator="grpo"),
}


def sums(split: str) -> list[dict[str, str]]:
    """The quickstart's problems as `3 + 4 =`, with their answers; each once."""
    rows = map(json.loads, (prepare() / "data" / f"{split}.jsonl").read_text().splitlines())
    found = {re.search(r"\d [+-] \d", row["prompt"][0]["content"]).group(): row["answer"] for row in rows}
    return [{"prompt": f"{expression} =", "answer": answer} for expression, answer in sorted(found.items())]


def make_tokenizer() -> PreTrainedTokenizerFast:
    one = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    one.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    one.decoder = decoders.Fuse()
    marks = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    return PreTrainedTokenizerFast(tokenizer_object=one, padding_side="left", **marks)


def encoded(tokenizer, rows: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] ids, and True where a token belongs to the answer or is the end after it."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [[*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    whole = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    own = [torch.tensor([False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    return tuple(torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (whole, own))


def log_probs(model, ids: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[B] log-probability of the answers; all begin at the first position and are padded behind."""
    logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (logps * own[:, 1:]).sum(dim=1)


def accuracy(model, tokenizer, rows: list[dict[str, str]]) -> float:
    """Mean probability of the right answer."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = log_probs(model, *encoded(tokenizer, rows)).exp().mean().item()
    model.train(was_training)
    return found


def half_knowing_model(tokenizer, rows: list[dict[str, str]], steps: int) -> LlamaForCausalLM:
    """A model that answers right in about RIGHT of its answers."""
    torch.manual_seed(0)
    draw = random.Random(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = [
            row if draw.random() < RIGHT else row | {"answer": str(draw.randint(-9, 18))}
            for row in draw.choices(rows, k=128)
        ]
        optimizer.zero_grad()
        (-log_probs(model, *encoded(tokenizer, batch)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


class Watch(TrainerCallback):
    """Held-out accuracy by episodes, after each update."""

    def __init__(self, tokenizer, rows):
        self.tokenizer, self.rows, self.curve = tokenizer, rows, []

    def on_train_begin(self, args, state, control, model=None, **_):
        self.note(0, model)

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % 2 == 0:
            self.note(state.global_step // 2 * BATCH, model)

    def note(self, episodes: int, model) -> None:
        model = model.get_base_model()  # its LoRA of the policy is the active one
        forward = type(model).forward
        self.curve.append([episodes, accuracy(_Plain(model, forward), self.tokenizer, self.rows)])


class _Plain:
    """A model called past what the trainer has put around its forward."""

    def __init__(self, model, forward):
        self._model, self._forward = model, forward
        self.training, self.eval, self.train = model.training, model.eval, model.train

    def __call__(self, **inputs):
        return self._forward(self._model, **inputs)


def train(method: str, seed: int, start: LlamaForCausalLM, options) -> dict:
    """One run's curve."""
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(start.config)
    model.load_state_dict(start.state_dict())
    watch = Watch(tokenizer, sums("test"))
    with tempfile.TemporaryDirectory() as out:
        args = trl_ext.PPOConfig(
            out, seed=seed, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
            logging_steps=2, total_episodes=options.episodes, per_device_train_batch_size=BATCH // 2,
            gradient_accumulation_steps=1, num_mini_batches=2, num_ppo_epochs=1, num_generations=8,
            response_length=4, temperature=1.0, learning_rate=options.learning_rate, lr_scheduler_type="linear",
            kl_coef=0.01, gradient_checkpointing=False, packing=False, **METHODS[method],
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        trainer = trl_ext.PPOTrainer(
            args, tokenizer, model, train_dataset=Dataset.from_list(sums("train")), peft_config=lora,
            reward_funcs=trl_ext.RuleSet([Answer(gold="answer", kind="number")]), callbacks=[watch],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        begun = time.process_time()
        trainer.train()
    scores = [log["objective/scores"] for log in trainer.state.log_history if "objective/scores" in log]
    return {
        "method": method,
        "seed": seed,
        "episodes": [episodes for episodes, _ in watch.curve],
        "held_out_accuracy": [round(value, 4) for _, value in watch.curve],
        "training_score": [round(score, 4) for score in scores],
        "processor_s": round(time.process_time() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=1280)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--supervised_steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    start = half_knowing_model(tokenizer, sums("train") + sums("test"), options.supervised_steps)
    print(f"held out, before: {accuracy(start, tokenizer, sums('test')):.1%}", flush=True)
    results = []
    for method in options.methods:
        for seed in options.seeds:
            results.append(train(method, seed, start, options))
            first, last = results[-1]["held_out_accuracy"][0], results[-1]["held_out_accuracy"][-1]
            print(f"{method} seed {seed}: {first:.1%} -> {last:.1%}, {results[-1]['processor_s']} s", flush=True)
            if options.output:  # after each run: a stopped benchmark keeps what it has
                given = {key: value for key, value in vars(options).items() if key != "output"}
                write(
                    options.output, {"benchmark": "family", "machine": machine(), "options": given, "results": results}
                )
    for method in options.methods:
        ends = [one["held_out_accuracy"][-1] for one in results if one["method"] == method]
        print(f"{method}: {statistics.mean(ends):.1%} at the end, {min(ends):.1%} to {max(ends):.1%}")


if __name__ == "__main__":
    main()
