"""`trl-ext grpo` with stand-ins for vLLM in a Python that has imported nothing yet, and in Ray's workers.

With DYING_SCRIPT, `dying.py` kills one of them.
"""

import os
import sys
from dataclasses import replace

from tests import fake_servers  # noqa: F401  # before TRL's modules look for vLLM
from tests.multi.programs import dying
from trl_ext.scripts.grpo import main as main
from trl_ext.scripts.grpo import make_parser as make_parser

if "DYING_SCRIPT" in os.environ:
    main = dying.main
if __name__ == "__main__":
    from trl_ext.cli import main as cli

    cli.SCRIPTS["grpo"] = replace(cli.SCRIPTS["grpo"], module="tests.multi.programs.served")
    sys.exit(cli.main())
