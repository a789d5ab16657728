"""The training script `DYING_SCRIPT`, in which process `DYING_RANK` is killed once, before step `DYING_STEP`."""

import os
import signal
from importlib import import_module
from pathlib import Path

from transformers import TrainerCallback


class Dies(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        mark = Path(args.output_dir).absolute().with_suffix(".died")
        if state.global_step == int(os.environ["DYING_STEP"]) and os.environ["RANK"] == os.environ["DYING_RANK"]:
            if not mark.exists():
                mark.write_text(f"rank {os.environ['RANK']} in step {state.global_step}")
                os.kill(os.getpid(), signal.SIGKILL)


def main(argv, callbacks=()):
    import_module(os.environ["DYING_SCRIPT"]).main(argv, [*callbacks, Dies()])
