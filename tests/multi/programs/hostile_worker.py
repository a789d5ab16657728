"""Worker of test_hostile_rules: GRPO on two processes with rules that misbehave now and then."""

import sys
import time

import torch
from datasets import Dataset

from tests import tiny
from tests.multi.programs.hostile_rules import WAYS, Misbehaves
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.rewards import Limits

torch.set_num_threads(1)

if __name__ == "__main__":
    folder, on_error, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rules = RuleSet(
        [Misbehaves(way=way, name=way) for way in WAYS],
        limits=Limits(cpu_s=0.1, wall_s=0.2, workers=1),
        on_error=on_error,
    )
    args = GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        max_steps=num_steps,
        max_completion_length=4,
        per_device_train_batch_size=4,
        num_generations=4,
        logging_steps=1,
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 64})
    trainer = GRPOTrainer(tiny.model("llama"), rules, args, prompts, processing_class=tiny.tokenizer())
    start = time.monotonic()
    try:
        trainer.train()
    finally:
        print(f"rank {trainer.accelerator.process_index} trained for {time.monotonic() - start:.1f} s", flush=True)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    print(
        f"rank {trainer.accelerator.process_index} made {trainer.state.global_step} steps, weights finite", flush=True
    )
    for way in WAYS:
        failed = [
            log.get(f"rules/{way}/{share}", 0.0)
            for log in logs
            for share in ("error_frac", "timeout_frac", "not_finite_frac")
        ]
        print(f"rank {trainer.accelerator.process_index} {way} failed {sum(failed) > 0}", flush=True)
