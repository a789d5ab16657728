"""The quickstart's recipe in one process, by TRL's trainer and by ours: held-out answers over seconds of training."""

import tempfile
import time
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import load_dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_ext.rewards import RuleSet

# What both take of the recipe; the batch of its two processes is that of one here.
KEYS = ("max_steps", "num_generations", "max_completion_length", "learning_rate", "lr_scheduler_type", "beta")
BATCH = 64
SEED = 42
ANSWERS = 4  # to each held-out problem, sampled at temperature 1


class HeldOut(TrainerCallback):
    """Samples answers to the held-out problems every few steps; the clock stops meanwhile.

    Attributes:
        curve: Steps, seconds of training until there, and the share of right answers.
    """

    def __init__(self, rows: Any, tokenizer: Any, rule: dict[str, Any], every: int, max_new_tokens: int):
        self._rows, self._tokenizer, self._every = rows, tokenizer, every
        self._rule, self._most = RuleSet.from_dict({"rules": [rule]}), max_new_tokens
        self._trained_s = 0.0
        self.curve: list[tuple[int, float, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._score(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            _wait()
            self._trained_s += time.perf_counter() - self._begun_s
            self._score(state.global_step, model)

    @torch.no_grad()
    def _score(self, step: int, model: Any) -> None:
        was_training = model.training
        model.eval()
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
        # On the left, whatever the trainer made of it.
        given = self._tokenizer.apply_chat_template(self._rows["prompt"], padding_side="left", **how)
        with torch.random.fork_rng():  # training samples as if nobody had asked
            torch.manual_seed(step)
            made = model.generate(
                **given.to(model.device),
                do_sample=True,
                top_k=0,
                num_return_sequences=ANSWERS,
                max_new_tokens=self._most,
            )
        texts = self._tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        prompts, golds = ([one for one in self._rows[key] for _ in range(ANSWERS)] for key in ("prompt", "answer"))
        right = self._rule(prompts=prompts, completions=answers, answer=golds)
        self.curve.append((step, round(self._trained_s, 2), round(sum(map(float, right)) / len(right), 4)))
        model.train(was_training)
        _wait()
        self._begun_s = time.perf_counter()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def race(library: str, folder: Path, device: str, seed: int = SEED, every: int = 2, **changes: Any) -> dict[str, Any]:
    """Train the quickstart's model.

    Args:
        library: "trl" or "trl_ext".
        folder: With `model` and `data`, as `benchmarks.quickstart.assets` makes them.
        device: "cuda" or "cpu".
        seed: Of the trainer: order of the rows, sampling.
        every: Steps between two looks at the held-out problems.
        changes: Of the trainer's config.

    Returns:
        `curve`, as in `HeldOut`, and `seconds` of training in all.
    """
    module = import_module(library)
    recipe = yaml.safe_load((files("trl_ext") / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    data = load_dataset(
        "json", data_files={split: str(folder / "data" / f"{split}.jsonl") for split in ("train", "test")}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    settings = {key: recipe[key] for key in KEYS} | {"per_device_train_batch_size": BATCH, "bf16": True} | changes
    settings |= {
        "use_cpu": device == "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    held_out = HeldOut(data["test"][:], tokenizer, recipe["rules"][0], every, settings["max_completion_length"])
    with tempfile.TemporaryDirectory() as out:
        trainer = module.GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=RuleSet.from_dict({"rules": recipe["rules"]}),
            args=module.GRPOConfig(output_dir=out, seed=seed, report_to="none", disable_tqdm=True, **settings),
            train_dataset=data["train"],
            processing_class=tokenizer,
            callbacks=[held_out],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {"curve": held_out.curve, "seconds": held_out.curve[-1][1]}
