"""Worker of test_kept_ranks: trains groups that are cut over forwards, in one launch with prompts kept and without.

All of it is deterministic: runs may differ only by the order in which floating-point numbers were added.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset

from tests import tiny
from tests.multi.programs.sequence_worker import LORA, zero
from tests.multi.programs.zero_worker import token_reward
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.packing import step_plan

# Words of the prompts of one generation: the first is cut on one process alone, the last fits into a forward.
PROMPTS = (70, 30, 45, 4)
NUM_GENERATIONS = 8
WIDTH = 12
# By name: the model's family, and what is set beside `config`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", dict(beta=0.05)),
    "rows that stay": ("llama", dict(loss_type="bnpo", per_device_train_batch_size=8, gradient_accumulation_steps=2)),
    "adapter": ("qwen3", dict(peft_config=LORA, gradient_checkpointing=True)),
    "window": ("gemma3", dict(gradient_checkpointing=True)),
    "zero2": ("qwen3", dict(deepspeed=zero(2))),
    "zero3": ("qwen3", dict(deepspeed=zero(3), gradient_checkpointing=True)),
    "zero3 adapter": ("llama", dict(deepspeed=zero(3), peft_config=LORA)),
    "sharing rows": ("qwen3", dict(sequence_parallel=2)),
    "sharing rows in zero3": ("qwen3", dict(sequence_parallel=2, deepspeed=zero(3))),
    "out of memory": ("llama", dict()),
}


def save_models(folder: Path) -> None:
    """Save the models of all cases, each under its family's name."""
    for family in sorted({family for family, _ in CASES.values()}):
        tiny.model(family).save_pretrained(folder / family)


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: between 1 and 12 tokens, by prompt and place among its completions."""
    tokenizer = trainer.processing_class
    first, completions = trainer.accelerator.process_index * len(prompts), []
    for row, prompt in enumerate(prompts, start=first):
        dice = random.Random(f"{prompt} {row % NUM_GENERATIONS}")
        completions.append([dice.randrange(4, tiny.VOCAB) for _ in range(dice.randint(1, WIDTH))])
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def trained(case: str, folder: Path, keeps: bool) -> dict[str, Any]:
    """Train; return the weights, tokens through the model by step, and prefixes that were kept."""
    family, settings = CASES[case]
    changes = dict(settings)
    peft_config = changes.pop("peft_config", None)
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    dice = random.Random(3)
    texts = [tiny.words(*(dice.randrange(3, tiny.VOCAB) for _ in range(n))) for n in PROMPTS * 2]
    options = dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8 // world,
        num_generations=NUM_GENERATIONS,
        max_completion_length=WIDTH,
        max_tokens_per_forward=90,
        packing=True,
        gradient_checkpointing=False,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        adam_epsilon=1e-3,
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=str(folder / family),
        reward_funcs=token_reward,
        args=GRPOConfig(**options | tiny.QUIET_ON_CPU | changes),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
        peft_config=peft_config,
    )
    prefix_groups = []
    plan = trainer._planner._plan

    def planned(*args: Any) -> Any:
        prefix_groups.append(len((made := plan(*args)).prefix_groups))
        return made

    trainer._planner._plan = planned
    if case == "out of memory":
        _run_out_once(trainer)
    with mock.patch.object(step_plan, "CALL_COST", 1 if keeps else 10**9):
        trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    logged = [
        log["packing/forwarded_tokens"] for log in trainer.state.log_history if "packing/forwarded_tokens" in log
    ]
    return {
        "weights": {name: weight.clone() for name, weight in (weights or {}).items()},
        "tokens": logged,
        "prefix_groups": prefix_groups,
        "level": trainer.forward_loop.halving.level("actor"),
    }


def _run_out_once(trainer: GRPOTrainer) -> None:
    """Let memory end once on rank 1, in a forward of several rows behind a prefix that is kept."""
    model, is_due = trainer.model, trainer.accelerator.process_index == 1
    plain = model.forward

    def forward(*args: Any, segments: Any = None, **kwargs: Any) -> Any:
        nonlocal is_due
        if is_due and segments is not None and segments.num_cached and len(segments.queries) > 1:
            is_due = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(*args, segments=segments, **kwargs)

    model.forward = forward


if __name__ == "__main__":
    torch.set_num_threads(1)
    file, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    got = {}
    for case in cases:
        for keeps in (False, True):
            got[case, keeps] = trained(case, file.parent, keeps)
            AcceleratorState._reset_state()
    if torch.distributed.get_rank() == 0:
        torch.save(got, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
