"""What a test runs first in each process, so that forwards or backwards of rank 1 run out of memory.

`OUT_OF_MEMORY` has, as JSON, what fails: `at`, the forwards with gradient, counted from 0, or null for all of them;
`where`, "forward" or "backward"; `model`, "actor" or "critic". Ranks leave `oom-rank<R>.json` in the output folder.
"""

import json
import os
from pathlib import Path

from tests.out_of_memory import Limit, fail_in_backward
from trl_ext.trainers.base.trainer import ExtendedTrainer

told = json.loads(os.environ["OUT_OF_MEMORY"])
plain_train = ExtendedTrainer.train


def train(self, *args, **kwargs):
    """Overrides ExtendedTrainer.train: with a limit on one rank."""
    rank = self.accelerator.process_index
    model = self._ppo_models.value_model if told["model"] == "critic" else self._models()[0]
    if rank == 1 and told["where"] == "backward":
        fail_in_backward(model)
    times = float("inf") if rank == 1 and told["where"] == "forward" else 0
    limit = Limit(model, at=None if told["at"] is None else set(told["at"]), times=times)
    result = plain_train(self, *args, **kwargs)
    facts = {"failed": limit.failed, "forwards": len(limit.seen), "halvings": dict(self.forward_loop.halving.level)}
    Path(self.args.output_dir, f"oom-rank{rank}.json").write_text(json.dumps(facts))
    return result


ExtendedTrainer.train = train
