"""GRPO on two ranks whose rules normalise, score nothing on one rank or both, compare, or misbehave.

Each rank's rewards differ, so that a batch that is not pooled shows in the statistics of rules.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from tests import tiny
from tests.multi.programs.hostile_rules import WAYS, Misbehaves
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Call, Length, Limits, Row, Rule, Verdict

NUM_STEPS, SAVED_AT = 4, 1


def length_of_prompt_and_text(row) -> float:
    return 10.0 * len(row.prompt) + len(row.text)


@dataclass(frozen=True, kw_only=True)
class AbstainsOn(Rule):
    tier = "inline"
    ranks: tuple[int, ...] = ()

    def score(self, row: Row) -> Verdict:
        return Verdict(None if torch.distributed.get_rank() in self.ranks else 1.0, "ok")


def trainer_with(folder: str, rules: Any, num_different: int = 5, **changes: Any) -> GRPOTrainer:
    settings = dict(
        **tiny.QUIET_ON_CPU,
        max_steps=NUM_STEPS,
        max_completion_length=4,
        per_device_train_batch_size=2,
        num_generations=2,
        logging_steps=1,
        save_steps=SAVED_AT,
        eval_strategy="steps",
        eval_steps=3,
    )
    args = GRPOConfig(folder, **settings | changes)
    prompts = Dataset.from_dict({"prompt": [tiny.words(*range(3, 4 + n % num_different)) for n in range(16)]})
    return GRPOTrainer(
        tiny.model("llama"), rules, args, prompts, prompts.select([0, 1]), processing_class=tiny.tokenizer()
    )


def normalised(folder: str, resume_from: str | None = None) -> dict:
    """Train, with an evaluation on the way, and return this rank's statistics and the logged rewards."""
    rules = RuleSet([Call(length_of_prompt_and_text, isolate=False)], normalise=True)
    trainer = trainer_with(folder, rules)
    trainer.train(resume_from_checkpoint=resume_from)
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {"moments": rules.state_dict()["moments"], "rewards": rewards}


def unscored(folder: str, ranks: tuple[int, ...]) -> str:
    """Train with a rule that abstains on these ranks; this rank's error, or how many steps it made."""
    trainer = trainer_with(folder, RuleSet([AbstainsOn(ranks=ranks), Length(high=2)]))
    try:
        trainer.train()
    except DataError as error:
        return str(error)
    return f"{trainer.state.global_step} steps"


@dataclass(frozen=True, kw_only=True)
class Longer(Rule):
    """The share of the group's other completions that are shorter; an equal length counts a half."""

    tier = "inline"
    reads_group = True

    def score(self, row: Row) -> Verdict:
        own, others = len(row.text), [len(one.text) for one in row.group]
        return Verdict(sum((other < own) + (other == own) / 2 for other in others) / max(len(others), 1))


def compared(folder: str) -> dict:
    """Train with completions that are compared, and compare both ranks' completions once more in one process."""
    batches: list[tuple] = []
    rule = Longer()

    def reward(prompts, completions, **_):
        batches.append((prompts, completions, RuleSet([rule])(prompts=prompts, completions=completions)))
        return batches[-1][2]

    trainer_with(folder, reward, num_different=16).train()  # equal prompts in a batch are one group
    per_rank: list[Any] = [None] * 2
    torch.distributed.all_gather_object(per_rank, batches)
    both = [[first + second for first, second in zip(*ranks, strict=True)] for ranks in zip(*per_rank, strict=True)]
    alone = [RuleSet([rule])(prompts=prompts, completions=completions) for prompts, completions, _ in both]
    refused = ""
    try:
        trainer_with(folder, RuleSet([rule]), per_device_train_batch_size=1)
    except ConfigError as error:
        refused = str(error)
    return {"by_rank": [values for *_, values in both], "alone": alone, "refused": refused}


def train(folder) -> dict:
    return {
        "whole": normalised(f"{folder}/whole"),
        "resumed": normalised(f"{folder}/resumed", f"{folder}/whole/checkpoint-{SAVED_AT}"),
        "one": unscored(f"{folder}/one", (0,)),
        "both": unscored(f"{folder}/both", (0, 1)),
        "compared": compared(f"{folder}/compared"),
    }


def train_with_hostile_rules(folder, on_error: str, num_steps: int) -> dict:
    """Whether the weights are finite, and which ways to misbehave were counted."""
    rules = RuleSet(
        [Misbehaves(way=way, name=way) for way in WAYS],
        limits=Limits(cpu_s=0.1, wall_s=0.2, workers=1),
        on_error=on_error,
    )
    batch = dict(per_device_train_batch_size=4, num_generations=4, max_steps=num_steps)
    trainer = trainer_with(str(folder), rules, 1, save_strategy="no", eval_strategy="no", **batch)
    start = time.monotonic()
    try:
        trainer.train()
    finally:
        print(f"rank {trainer.accelerator.process_index} trained for {time.monotonic() - start:.1f} s", flush=True)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    shares = ("error_frac", "timeout_frac", "not_finite_frac")
    return {
        "steps": trainer.state.global_step,
        "finite": all(torch.isfinite(p).all().item() for p in trainer.model.parameters()),
        "failed": [way for way in WAYS if any(log.get(f"rules/{way}/{share}") for log in logs for share in shares)],
    }
