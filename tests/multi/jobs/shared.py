"""What the jobs have in common: settings, data, completions that depend on nothing but their prompt, facts."""

import os
import random
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig

from tests import tiny

NUM_STEPS = 3
NUM_PROMPTS = 3  # in an optimizer step; with two processes, the second prompt's group lies half on either
NUM_GENERATIONS = 4
GRADIENT_ACCUMULATION_STEPS = 2
ROWS_PER_STEP = NUM_PROMPTS * NUM_GENERATIONS
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
SETTINGS = dict(
    **tiny.QUIET_ON_CPU,
    max_steps=NUM_STEPS,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    # Adam divides by the gradient's size: with the usual 1e-8, an entry that is 1e-9 here and -1e-9 there would move
    # by the whole learning rate, in opposite directions. With 1e-3, noise in the gradient grows tenfold at most
    # (learning rate / epsilon) on its way to the weight.
    adam_epsilon=1e-3,
    weight_decay=0.0,
    logging_steps=1,
    save_strategy="no",
)


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def zero(stage: int) -> dict[str, Any]:
    """Settings of DeepSpeed that split every weight, as small as they are."""
    own = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | own,
    }


# Data -------------------------------------------------------------------------------------------------------------


def prompts(count: int) -> Dataset:
    """Prompts of two to six words."""
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{(7 * i + j) % 90}" for j in range(2 + i % 5)) for i in range(count)]}
    )


def token_reward(completion_ids, **kwargs):
    """Between 0 and 1: the mean of the ids modulo 7, over 6."""
    return [sum(token % 7 for token in ids) / (6 * len(ids)) for ids in completion_ids]


def reward_of_long_prompts(prompts, completion_ids, **kwargs):
    """The same, but 1 for all completions of a prompt of less than four words."""
    rewards = token_reward(completion_ids)
    return [1.0 if len(p.split()) < 4 else reward for p, reward in zip(prompts, rewards, strict=True)]


def given_completion(prompt: str, sample: int, tokenizer) -> list[int]:
    """Between 1 and 12 token ids; two in three end with EOS, the others look cut off."""
    dice = random.Random(f"{prompt} {sample}")
    ids = [dice.randrange(4, len(tokenizer)) for _ in range(dice.randint(1, 12))]
    return [*ids[:-1], tokenizer.eos_token_id] if dice.random() < 2 / 3 else ids


def forked_completion(prompt: str, sample: int, tokenizer) -> list[int]:
    """A given completion after 24 tokens that all of the prompt's begin with, and 18 more of two and two."""
    parts = ((f"{prompt} all", 24), (f"{prompt} {sample // 2} two", 18))
    dice = [(random.Random(name), count) for name, count in parts]
    begun = [one.randrange(4, len(tokenizer)) for one, count in dice for _ in range(count)]
    return begun + given_completion(prompt, sample, tokenizer)


class Rollout:
    """TRL's `rollout_func`: hands out completions and notes the prompts of every step, over all ranks.

    Args:
        completion: Of a prompt and of the place in its group.
        num_generations: Rows of a group.
    """

    def __init__(self, completion: Callable = given_completion, num_generations: int = NUM_GENERATIONS):
        self.prompts_of_steps: list[list[str]] = []
        self.completion, self.num_generations = completion, num_generations

    def __call__(self, prompts, trainer):
        self.prompts_of_steps.append(gather_object(prompts))
        tokenizer = trainer.processing_class
        rows = enumerate(prompts, start=trainer.accelerator.process_index * len(prompts))
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [self.completion(text, row % self.num_generations, tokenizer) for row, text in rows],
            "logprobs": None,
        }


# Facts ------------------------------------------------------------------------------------------------------------


def engine_facts(trainer) -> dict[str, Any]:
    engine = trainer.model_wrapped
    return {
        "world_size": trainer.accelerator.num_processes,
        "zero_stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "num_split_parameters": sum(not getattr(p, "ds_persist", True) for p in trainer.model.parameters()),
    }


def steps_of(trainer) -> list[dict[str, Any]]:
    """What was logged of each optimizer step."""
    return [log for log in trainer.state.log_history if "grad_norm" in log]


def release(trainer) -> None:
    """Make room for the job's next trainer."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
