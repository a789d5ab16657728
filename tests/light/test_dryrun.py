"""`trl-ext dryrun` answers for its help without torch, and so does the import of the twin's driver."""

import subprocess
import sys

import pytest

CODE = "import sys, {module}; sys.exit('torch' in sys.modules)"


@pytest.mark.parametrize("module", ["trl_ext.memory.twin", "trl_ext.cli.dryrun"])
def test_importing_it_imports_no_torch(module):
    assert subprocess.run([sys.executable, "-c", CODE.format(module=module)], check=False).returncode == 0
