"""Two thousand steps of GRPO with rules: nothing that a step takes is kept.

`make long-run` takes about ten minutes; with -s pytest prints what it measured.
"""

import ctypes
import gc
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

import trl_ext
from tests import tiny
from trl_ext.rewards import Length, Pattern, Repetition

torch.set_num_threads(1)

STEPS, SETTLED = 2_000, 200
# A kilobyte a step would be 1.8 MB.
GROWTH_BYTES = 1 << 20


@dataclass(frozen=True)
class Held:
    """What the process holds: bytes of memory, threads, open handles and child processes."""

    rss_bytes: int
    threads: int
    handles: int
    children: int

    @classmethod
    def now(cls) -> Self:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, so that growth is what is held
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return cls(
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            threads=int(status["Threads"]),
            handles=len(os.listdir("/proc/self/fd")),
            children=len(children),
        )


class Watch(TrainerCallback):
    """Notes at some steps what is held."""

    def __init__(self) -> None:
        self.seen: dict[int, Held] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % SETTLED == 0:
            self.seen[state.global_step] = Held.now()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Held]:
    rules = trl_ext.RuleSet(
        [
            Pattern(r"w\d+( w\d+)*", weight=0.2),
            Length(high=3, unit="words", weight=0.2),
            Repetition(ngram=1, weight=0.2),
        ],
        normalise=True,
    )
    rows = [{"prompt": tiny.words(*range(5, 5 + n))} for n in (9, 1, 4, 7)]
    args = trl_ext.GRPOConfig(
        str(tmp_path_factory.mktemp("long")),
        **tiny.QUIET_ON_CPU,
        packing=True,
        max_steps=STEPS,
        save_steps=SETTLED // 2,
        save_total_limit=2,
        logging_steps=20,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=5,
        max_tokens_per_forward=64,
        gradient_checkpointing=False,
    )
    model = tiny.model("llama", hidden_size=32, num_hidden_layers=2)
    trainer = trl_ext.GRPOTrainer(model, rules, args, Dataset.from_list(rows), processing_class=tiny.tokenizer())
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    assert trainer._packs and trainer.state.global_step == STEPS
    print(json.dumps({step: asdict(held) for step, held in watch.seen.items()}, indent=1))
    return watch.seen


def test_memory_does_not_grow(seen: dict[int, Held]) -> None:
    assert seen[STEPS].rss_bytes - seen[SETTLED].rss_bytes <= GROWTH_BYTES


@pytest.mark.parametrize("what", ["threads", "handles", "children"])
def test_nothing_else_is_left_over(seen: dict[int, Held], what: str) -> None:
    assert getattr(seen[STEPS], what) <= getattr(seen[SETTLED], what)
