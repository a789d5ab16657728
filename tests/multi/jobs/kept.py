"""Groups that are cut over forwards, by cases in one launch: with prompts kept and without, and by a still policy."""

import random
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset

from tests import tiny
from tests.half_precision import wide_model
from tests.multi.jobs.shared import LORA, SETTINGS, Rollout, num_processes, token_reward, zero
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.packing import step_plan

# Words of the prompts of one generation: the first is cut on one process alone, the last fits into a forward.
PROMPTS = (70, 30, 45, 4)
NUM_GENERATIONS = 8
# By name: the model's family, and what is set.
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
# Several updates of each generation at learning rate 0. Rows change ranks in all of them.
UNMOVED: dict[str, dict[str, Any]] = {
    "ddp": dict(beta=0.1, num_iterations=2),
    "zero3": dict(deepspeed=zero(3)),
    "sharing rows": dict(sequence_parallel=2, beta=0.1),
}


def made(folder, model: str, peft_config=None, **changes: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    dice = random.Random(3)
    texts = [tiny.words(*(dice.randrange(3, tiny.VOCAB) for _ in range(n))) for n in PROMPTS * 2]
    options = dict(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8 // num_processes(),
        num_generations=NUM_GENERATIONS,
        max_completion_length=12,
        max_tokens_per_forward=90,
        packing=True,
        gradient_checkpointing=False,
        max_steps=2,
        shuffle_dataset=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=token_reward,
        args=GRPOConfig(str(folder / "out"), **SETTINGS | options | changes),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tiny.tokenizer(),
        rollout_func=Rollout(num_generations=NUM_GENERATIONS),
        peft_config=peft_config,
    )


def train(folder, models: str, cases: list[str], still: list[str]) -> dict:
    """Of each case, with prompts kept and without; and of each case of a policy that stands still."""
    found: dict = {}
    for case in cases:
        for keeps in (False, True):
            found[case, keeps] = train_one(folder, models, case, keeps)
            AcceleratorState._reset_state()
    for case in still:
        found[case] = stand_still(folder, f"{models}/wide", case)
        AcceleratorState._reset_state()
    return found


def train_one(folder, models: str, case: str, keeps: bool) -> dict[str, Any]:
    """Weights, tokens through the model by step, and prefixes that were kept."""
    family, settings = CASES[case]
    trainer = made(folder, f"{models}/{family}", **settings)
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
    logs = [log for log in trainer.state.log_history if "packing/forwarded_tokens" in log]
    return {
        "weights": {name: weight.clone() for name, weight in (weights or {}).items()},
        "tokens": [log["packing/forwarded_tokens"] for log in logs],
        "prefix_groups": prefix_groups,
        "level": trainer.forward_loop.halving.level["actor"],
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


def stand_still(folder, model: str, case: str) -> list[dict]:
    """The log entries of all steps, in bfloat16."""
    own = dict(steps_per_generation=4, gradient_accumulation_steps=1, max_steps=8, learning_rate=0.0, bf16=True)
    own |= dict(epsilon=1e-9, epsilon_high=1e-9)  # any ratio but 1 is clipped where its advantage asks
    trainer = made(folder, model, **own | UNMOVED[case])
    with mock.patch.object(step_plan, "CALL_COST", 0):
        trainer.train()
    assert trainer._packs
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def save_models(folder) -> None:
    """Save the models of all cases, each under its family's name, and the one that stands still."""
    for family in sorted({family for family, _ in CASES.values()}):
        tiny.model(family).save_pretrained(folder / family)
    wide_model("qwen3").save_pretrained(folder / "wide")
