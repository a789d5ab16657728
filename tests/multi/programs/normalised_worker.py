"""Worker of test_normalised_rules: GRPO with a rule set that normalises, saved and resumed at its first step.

With two processes each rank's rewards differ, so that a batch that is not pooled shows in the statistics.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.rewards import Call

torch.set_num_threads(1)

NUM_STEPS, SAVED_AT = 4, 1


def length_of_prompt_and_text(row) -> float:
    return 10.0 * len(row.prompt) + len(row.text)


def train(folder: str, resume_from: str | None = None) -> dict:
    """Train, with an evaluation on the way, and return each rank's statistics and the logged rewards."""
    rules = RuleSet([Call(length_of_prompt_and_text, isolate=False)], normalise=True)
    args = GRPOConfig(
        folder,
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
    prompts = Dataset.from_dict({"prompt": [tiny.words(*range(3, 4 + n % 5)) for n in range(16)]})
    trainer = GRPOTrainer(
        tiny.model("llama"), rules, args, prompts, prompts.select([0, 1]), processing_class=tiny.tokenizer()
    )
    trainer.train(resume_from_checkpoint=resume_from)
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {"moments": gather_object([rules.state_dict()["moments"]]), "rewards": rewards}


if __name__ == "__main__":
    folder = sys.argv[1]
    whole = train(f"{folder}/whole")
    resumed = train(f"{folder}/resumed", f"{folder}/whole/checkpoint-{SAVED_AT}")
    state = PartialState()
    if state.is_main_process:
        Path(folder, "facts.json").write_text(json.dumps({"whole": whole, "resumed": resumed}))
    state.wait_for_everyone()
    state.destroy_process_group()
