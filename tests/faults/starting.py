"""Starts the programs of this folder from a test, and reads what they found."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.multi.launching import TIMEOUT_S, environment
from tests.multi.warm import warm_python

IS_THOROUGH = bool(os.environ.get("TRL_EXT_THOROUGH"))


def found_by(program: str, file: str, folder: Path, kind: str, *options: Any) -> Any:
    """Run `tests.faults.PROGRAM` to its end; return the content of the file that it wrote, or fail with its log."""
    command = [warm_python(), "-m", f"tests.faults.{program}", kind, folder, *options]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.run(
            [str(part) for part in command],
            env=environment(),
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S * (10 if IS_THOROUGH else 1),
        )
    if process.returncode != 0:
        pytest.fail(f"exit code {process.returncode} of {program}\n{log.read_text()[-6000:]}", pytrace=False)
    return json.loads((folder / file).read_text())
