"""Runs another worker, or a training script, in which forwards or backwards of one rank run out of memory.

What fails is told by variables of the environment, so that arguments are the other worker's:
    OOM_RUNS: The module with the `main` to run.
    OOM_RANK: The rank that runs out.
    OOM_AT: Its forwards with gradient that fail, counted from 0, with commas between; empty for all of them.
    OOM_IN: "forward" or "backward".
    OOM_MODEL: "actor" or "critic".
Each rank leaves `oom-rank<R>.json` in the output folder.
"""

import json
import os
from importlib import import_module
from pathlib import Path

import torch

from tests.out_of_memory import Limit, fail_in_backward
from trl_ext.trainers.base.trainer import ExtendedTrainer

torch.set_num_threads(1)
AT = os.environ["OOM_AT"]
plain_train = ExtendedTrainer.train


def train(self, *args, **kwargs):
    """Overrides ExtendedTrainer.train: with a limit on one rank."""
    rank = self.accelerator.process_index
    model = self._ppo_models.value_model if os.environ["OOM_MODEL"] == "critic" else self._models()[0]
    is_due = rank == int(os.environ["OOM_RANK"])
    if is_due and os.environ["OOM_IN"] == "backward":
        fail_in_backward(model)
    at = None if not AT else {int(number) for number in AT.split(",")}
    limit = Limit(model, at=at, times=float("inf") if is_due and os.environ["OOM_IN"] == "forward" else 0)
    result = plain_train(self, *args, **kwargs)
    facts = {"failed": limit.failed, "forwards": len(limit.seen), "halvings": dict(self.forward_loop.halving._level)}
    Path(self.args.output_dir, f"oom-rank{rank}.json").write_text(json.dumps(facts))
    return result


ExtendedTrainer.train = train

if __name__ == "__main__":
    import_module(os.environ["OOM_RUNS"]).main()
