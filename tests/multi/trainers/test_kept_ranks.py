"""Prompts that go through the model once for all forwards of a step: weights as without, over processes and ZeRO."""

import json
import subprocess

import pytest
import torch

from tests.conftest import ROOT
from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import TIMEOUT_S, environment, launched
from tests.multi.programs.kept_worker import CASES, save_models

TOLERANCE = 1e-6
RUN = list(CASES) if IS_THOROUGH else ["rows that stay", "zero3", "out of memory"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    file = tmp_path_factory.mktemp("kept") / "got.pt"
    save_models(file.parent)
    worker = ["-m", "tests.multi.programs.kept_worker", file, json.dumps(RUN)]
    command = list(map(str, [*launched("cpu", 2), *worker]))
    run = subprocess.run(command, cwd=ROOT, env=environment(), timeout=TIMEOUT_S, capture_output=True)
    assert run.returncode == 0, run.stderr[-6000:].decode()
    return torch.load(file)


@pytest.mark.parametrize("case", RUN)
def test_weights_are_those_of_prompts_forwarded_again(trained, case):
    kept, again = trained[case, True], trained[case, False]
    assert sum(kept["prefix_groups"]) >= 2 and not sum(again["prefix_groups"])
    assert sum(kept["tokens"]) < 0.9 * sum(again["tokens"])
    assert kept["weights"].keys() == again["weights"].keys() and kept["weights"]
    distance = max((kept["weights"][name] - again["weights"][name]).abs().max().item() for name in kept["weights"])
    print(f"largest weight difference: {distance:.1e}")
    assert distance <= TOLERANCE
    assert kept["level"] == (case == "out of memory")
