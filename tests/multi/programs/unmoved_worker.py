"""Worker of test_unmoved_ranks: several updates of each generation by a policy that does not move, in bfloat16."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset

from tests import tiny
from tests.half_precision import wide_model
from tests.multi.programs.kept_worker import NUM_GENERATIONS, PROMPTS, rollout
from tests.multi.programs.sequence_worker import zero
from tests.multi.programs.zero_worker import token_reward
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.packing import step_plan

# By name: what is set. Rows change ranks in all of them, and prompts are kept over forwards.
CASES: dict[str, dict[str, Any]] = {
    "ddp": dict(beta=0.1, num_iterations=2),
    "zero3": dict(deepspeed=zero(3)),
    "sharing rows": dict(sequence_parallel=2, beta=0.1),
}


def trained(case: str, folder: Path) -> list[dict[str, float]]:
    """Train at learning rate 0; return the log entries of all steps."""
    dice = torch.Generator().manual_seed(3)
    texts = [tiny.words(*torch.randint(3, tiny.VOCAB, (n,), generator=dice).tolist()) for n in PROMPTS * 2]
    options = dict(
        output_dir=str(folder / "out"),
        bf16=True,
        per_device_train_batch_size=4,
        steps_per_generation=4,
        gradient_accumulation_steps=1,
        num_generations=NUM_GENERATIONS,
        max_completion_length=12,
        max_tokens_per_forward=90,
        packing=True,
        gradient_checkpointing=False,
        max_steps=8,
        learning_rate=0.0,
        epsilon=1e-9,  # any ratio but 1 is clipped where its advantage asks
        epsilon_high=1e-9,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=token_reward,
        args=GRPOConfig(**options | {k: v for k, v in tiny.QUIET_ON_CPU.items() if k != "bf16"} | CASES[case]),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
    )
    with mock.patch.object(step_plan, "CALL_COST", 0):
        trainer.train()
    assert trainer._packs
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    torch.set_num_threads(1)
    file, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        wide_model("qwen3").save_pretrained(file.parent / "model")
    torch.distributed.barrier()
    logs = {}
    for case in cases:
        logs[case] = trained(case, file.parent)
        AcceleratorState._reset_state()
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(logs))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
