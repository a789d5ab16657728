"""Does a token budget bound what a step holds for its backward? Bytes saved by autograd, at the highest moment of a
step, against those of the step's costliest forward alone.

One optimizer step of 16 sequences on a processor, without checkpointing, in bytes: figures that a busy machine does
not change. The budgets are the tokens of the step and a half, a quarter and an eighth of them. A step whose forwards
go backward one by one holds as much as its largest forward; one whose forwards wait for a backward holds all of them.

    python benchmarks/activations.py --output benchmarks/results/activations_cpu.json
"""

import argparse
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import datasets
import torch
import transformers
from datasets import Dataset
from grpo_task import VOCAB, Shape, fixed_rollout, model, reward, tokenizer
from machine import save
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import trl_ext

ASKED = 1.05
PARTS = (1, 2, 4, 8)
TRAINERS = ("grpo", "ppo", "reward")
SHAPE = Shape("", prompt=40, mean=60, longest=60, sigma=0.0, groups=4, generations=4)
WIDTH = 192


@dataclass(frozen=True, slots=True)
class Result:
    """One step.

    Args:
        budget: `max_tokens_per_forward`.
        forwards: Of the model, with gradients.
        held_mib: Most bytes that waited for a backward at one time.
        row_mib: Of them, those that the costliest forward saved.
        ratio: The first over the second.
    """

    trainer: str
    budget: int
    forwards: int
    held_mib: float
    row_mib: float
    ratio: float
    asked: float = ASKED


class Held:
    """Bytes of the tensors that autograd keeps, without weights; each storage once.

    Attributes:
        peak: Most at one time.
        rows: Of each forward of the model with gradients, the bytes that it added.
    """

    def __init__(self, model: torch.nn.Module):
        self.now = self.peak = 0
        self.rows: list[int] = []
        self._count: dict[int, int] = {}
        self._weights: set[int] = set()
        self._model = model
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def __enter__(self) -> "Held":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _begin(self, *call: Any) -> None:
        # Not before: a trainer may move weights, and activations then lie where they were.
        self._weights = {p.untyped_storage().data_ptr() for p in self._model.parameters()}
        self._before = self.now

    def _end(self, *call: Any) -> None:
        if torch.is_grad_enabled():
            self.rows.append(self.now - self._before)

    def _keep(self, tensor: torch.Tensor) -> "_Kept":
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self._weights:
            self._count[key] = self._count.get(key, 0) + 1
            if self._count[key] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(kept, self._drop, key, size)
        return kept

    def _drop(self, key: int, size: int) -> None:
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]
            self.now -= size


class _Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def settings(rows: int, budget: int | None, folder: str) -> dict[str, Any]:
    return dict(
        output_dir=folder,
        per_device_train_batch_size=rows,
        max_tokens_per_forward=budget,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        packing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer(
    name: str,
    policy: LlamaForCausalLM,
    shape: Shape,
    budget: int | None,
    folder: str,
    rollout: Callable[..., Any],
    processes: int = 1,
    **more: Any,
) -> Any:
    """Make one of ours with these and more settings, for one step of the shape's tokens, which processes share."""
    rows, more = shape.rows // processes, more | {"sequence_parallel": processes}
    if name == "reward":
        args = trl_ext.RewardConfig(**settings(rows // 2, budget, folder), **more, max_length=None)
        found = trl_ext.RewardTrainer(
            scoring(policy.config), args, train_dataset=pairs(shape), processing_class=tokenizer()
        )
    else:
        own = {"grpo": {"num_generations": shape.generations, "beta": 0.0}, "ppo": {"critic": "head"}}[name]
        args = getattr(trl_ext, f"{name.upper()}Config")(
            **settings(rows, budget, folder), **own, **more, max_completion_length=shape.longest
        )
        found = getattr(trl_ext, f"{name.upper()}Trainer")(
            model=policy,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i + 3}" for i in range(shape.rows)]}),
            processing_class=tokenizer(),
            rollout_func=rollout,
        )
    found.remove_callback(transformers.PrinterCallback)
    return found


def scoring(config: LlamaConfig) -> LlamaForSequenceClassification:
    config.num_labels, config.pad_token_id = 1, 0
    return LlamaForSequenceClassification(config)


def pairs(shape: Shape) -> Dataset:
    """Return pairs of the shape's lengths; two pairs a prompt."""
    draw = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return "".join(f"w{i} " for i in torch.randint(3, VOCAB, (count,), generator=draw).tolist())

    prompts = [text(shape.prompt) for _ in range(shape.rows // 4) for _ in range(2)]
    return Dataset.from_list(
        [{"prompt": p, "chosen": text(shape.mean), "rejected": text(shape.mean)} for p in prompts]
    )


def step(name: str, layers: int, budget: int | None) -> Held:
    """What one optimizer step holds."""
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(name, model(layers, WIDTH), SHAPE, budget, folder, fixed_rollout(SHAPE, itertools.count()))
        with Held(subject.model) as held:
            subject.train()
    return held


def measure(name: str, layers: int) -> list[Result]:
    # The step as one forward: a prompt's last token stands with each completion, and PPO has one completion a prompt.
    # No budget is below the longest pair.
    least = SHAPE.prompt + SHAPE.longest + 2
    whole = SHAPE.rows * (SHAPE.prompt + SHAPE.mean)
    if name == "grpo":
        whole -= (SHAPE.rows - SHAPE.groups) * (SHAPE.prompt - 1)
    if name == "reward":
        whole, least = SHAPE.rows * least, 2 * least
    results = []
    for part in PARTS:
        budget = max(whole // part, least)
        held = step(name, layers, budget)
        row = max(held.rows)
        mib = [round(num_bytes / 2**20, 3) for num_bytes in (held.peak, row)]
        results.append(Result(name, budget, len(held.rows), *mib, ratio=round(held.peak / row, 3)))
    return results


def show(results: list[Result]) -> None:
    table = Table(title="Saved for backward: the most of a step, and of one forward")
    for column in ("trainer", "budget", "forwards", "held MiB", "one forward MiB", "ratio", "asked"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for r in results:
        table.add_row(*map(str, (r.trainer, r.budget, r.forwards, r.held_mib, r.row_mib, r.ratio, r.asked)))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=TRAINERS, choices=TRAINERS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    results: list[Result] = []
    for name in options.trainers:
        results += measure(name, options.layers)
        show(results)
        save(options.output, "activations", layers=options.layers, results=[asdict(r) for r in results])


if __name__ == "__main__":
    main()
