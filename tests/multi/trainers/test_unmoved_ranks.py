"""Rows that change ranks: the ratio of a policy that has not moved is 1 to the bit in bfloat16, in each update."""

import json
import subprocess

import pytest

from tests.conftest import ROOT
from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import TIMEOUT_S, environment, launched
from tests.multi.programs.unmoved_worker import CASES

RUN = list(CASES) if IS_THOROUGH else ["ddp"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    file = tmp_path_factory.mktemp("unmoved") / "logs.json"
    command = list(map(str, [*launched("cpu", 2), "-m", "tests.multi.programs.unmoved_worker", file, json.dumps(RUN)]))
    run = subprocess.run(command, cwd=ROOT, env=environment(), timeout=TIMEOUT_S, capture_output=True)
    assert run.returncode == 0, run.stderr[-6000:].decode()
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", RUN)
def test_no_token_is_clipped_before_anything_moved(logs, case):
    steps = logs[case]
    assert len(steps) == 8 and all(step["grad_norm"] > 0 for step in steps)
    assert [step["clip_ratio/region_mean"] for step in steps] == [0.0] * 8
    assert [step["kl"] for step in steps if "kl" in step] == [0.0] * 8 * ("beta" in CASES[case])
