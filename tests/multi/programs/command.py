"""`trl-ext ARGUMENTS` in a process that is warm, which starts its own one process by a warm Python, too."""

import os
import sys

from trl_ext.cli.main import main

sys.executable = os.environ["PYTHON_EXEC"]
sys.exit(main())
