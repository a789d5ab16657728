"""Worker of test_rule_ranks: GRPO on two ranks whose rules normalise, score nothing on one rank or both, or compare.

Each rank's rewards differ, so that a batch that is not pooled shows in the statistics of rules.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Call, Length, Row, Rule, Verdict

torch.set_num_threads(1)

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
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
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
    """Train, with an evaluation on the way, and return each rank's statistics and the logged rewards."""
    rules = RuleSet([Call(length_of_prompt_and_text, isolate=False)], normalise=True)
    trainer = trainer_with(folder, rules)
    trainer.train(resume_from_checkpoint=resume_from)
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {"moments": gather_object([rules.state_dict()["moments"]]), "rewards": rewards}


def unscored(folder: str, ranks: tuple[int, ...]) -> list[str]:
    """Train with a rule that abstains on these ranks; each rank's error, or how many steps it made."""
    trainer = trainer_with(folder, RuleSet([AbstainsOn(ranks=ranks), Length(high=2)]))
    try:
        trainer.train()
    except DataError as error:
        return gather_object([str(error)])
    return gather_object([f"{trainer.state.global_step} steps"])


@dataclass(frozen=True, kw_only=True)
class Longer(Rule):
    """The share of the group's other completions that are shorter; an equal length counts a half."""

    tier = "inline"
    reads_group = True

    def score(self, row: Row) -> Verdict:
        own, others = len(row.text), [len(one.text) for one in row.group]
        return Verdict(sum((other < own) + (other == own) / 2 for other in others) / max(len(others), 1))


def compared(folder: str) -> dict:
    """Train with completions that are compared, and compare those of both ranks once more in one process."""
    batches: list[tuple] = []
    rule = Longer()

    def reward(prompts, completions, **_):
        batches.append((prompts, completions, RuleSet([rule])(prompts=prompts, completions=completions)))
        return batches[-1][2]

    trainer_with(folder, reward, num_different=16).train()  # equal prompts in a batch are one group
    per_rank = gather_object([batches])
    both = [[first + second for first, second in zip(*ranks, strict=True)] for ranks in zip(*per_rank, strict=True)]
    alone = [RuleSet([rule])(prompts=prompts, completions=completions) for prompts, completions, _ in both]
    refused = ""
    try:
        trainer_with(folder, RuleSet([rule]), per_device_train_batch_size=1)
    except ConfigError as error:
        refused = str(error)
    return {"by_rank": [values for *_, values in both], "alone": alone, "refused": gather_object([refused])}


if __name__ == "__main__":
    folder = sys.argv[1]
    facts = {
        "whole": normalised(f"{folder}/whole"),
        "resumed": normalised(f"{folder}/resumed", f"{folder}/whole/checkpoint-{SAVED_AT}"),
        "one": unscored(f"{folder}/one", (0,)),
        "both": unscored(f"{folder}/both", (0, 1)),
        "compared": compared(f"{folder}/compared"),
    }
    state = PartialState()
    if state.is_main_process:
        Path(folder, "facts.json").write_text(json.dumps(facts))
    state.wait_for_everyone()
    state.destroy_process_group()
