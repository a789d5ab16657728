"""The program of a launch: one job of the table, on each process.

    python -m tests.multi.worker JOB FOLDER OPTIONS

Options are the job's keyword arguments, as JSON. A job returns what the test wants to know; a list of what each
process returned stands in the folder's `facts.pt` afterwards, next to the job's files.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

# Module and function of `tests.multi.jobs`.
JOBS = {
    "ahead": "ahead.train",
    "async grpo": "async_grpo.train",
    "checkpoints": "checkpoints.train",
    "curriculum": "groups.draw",
    "diverging": "grpo.diverge",
    "environment": "groups.play",
    "evaluation": "groups.evaluate",
    "exchange": "exchange.change_ranks",
    "exchange by rows": "exchange.change_ranks_by_rows",
    "failing": "failing.train",
    "failing environment": "failing.play",
    "gather": "exchange.gather",
    "generation": "grpo.generate",
    "grpo": "grpo.train",
    "hostile rules": "rules.train_with_hostile_rules",
    "image": "image.train",
    "kept": "kept.train",
    "memory live": "memory_live.train",
    "memory plan": "reward.train_by_plan",
    "oversampling": "groups.oversample",
    "ppo": "ppo.train",
    "ppo in bfloat16": "ppo.train_in_bfloat16",
    "rehearsal": "rehearsal.train",
    "reward": "reward.train",
    "reward evaluation": "reward.evaluate",
    "rules": "rules.train",
    "sequence": "sequence.train",
    "ulysses": "ulysses.compute",
}


def main() -> None:
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    module, _, function = JOBS[name].partition(".")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    everyone = [getattr(import_module(f"tests.multi.jobs.{module}"), function)(folder, **options)]
    if dist.is_initialized():
        mine, everyone = everyone[0], [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    if os.environ.get("RANK", "0") == "0":
        torch.save(everyone, folder / "facts.pt")
    if dist.is_initialized():
        # Leave together: a rank that ends while the other is at work can take it down.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
