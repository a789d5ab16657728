"""pytest collects every lane: its modules can be imported, and its markers and parameters exist."""

import re
import subprocess

from tests.conftest import ROOT
from tests.lanes.run_all import LANES
from tests.multi.launching import environment
from tests.multi.warm import warm_python

# Packages that only a lane's own environment has.
THEIRS = {"sky"}


def test_every_lane_is_collected():
    command = [warm_python(), "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/lanes"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | {"PYTEST_ADDOPTS": ""}, capture_output=True, text=True, check=False
    )
    errors = re.findall(r"^E  .*$", done.stdout, re.MULTILINE)
    missing = {re.sub(r".*No module named '(\w+)'$", r"\1", error) for error in errors}
    assert missing <= THEIRS, done.stdout[-5000:]
    assert int(re.search(r"(\d+) tests collected", done.stdout)[1]) > 10 * len(LANES)
