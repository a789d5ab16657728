"""The training script `DYING_SCRIPT`, in which process `DYING_RANK` is killed once, before step `DYING_STEP`.

With `DYING_OF=data` it raises an IndexError instead, as TRL does for an empty prompt.
"""

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
                if os.environ["DYING_OF"] == "data":
                    raise IndexError("index -1 is out of bounds for dimension 0 with size 0")
                os.kill(os.getpid(), signal.SIGKILL)


def main(argv, callbacks=()):
    import_module(os.environ["DYING_SCRIPT"]).main(argv, [*callbacks, Dies()])
