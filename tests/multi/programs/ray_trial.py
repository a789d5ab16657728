"""Start `dying.py` under Ray, as `trl-ext SCRIPT --launcher ray` does a script: ray_trial.py SCRIPT [arguments]."""

import os
import sys
from importlib import import_module

from trl_ext.launch.ray_train import launch
from trl_ext.scripts.exit import user_errors

if __name__ == "__main__":
    os.environ["DYING_SCRIPT"] = f"trl_ext.scripts.{sys.argv[1]}"
    parser = import_module(os.environ["DYING_SCRIPT"]).make_parser()
    with user_errors():
        sys.exit(launch("tests.multi.programs.dying", parser, sys.argv[2:]))
