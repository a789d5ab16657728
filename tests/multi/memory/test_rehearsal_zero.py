"""Two processes that rehearse before step 1 train the bits of two that do not, under DDP and ZeRO-3; with
`TRL_EXT_THOROUGH=1` also under ZeRO-1 and 2 and the offload files.

A launch trains each kind of model twice; most of its time are imports.
"""

import functools
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.multi.launching import JSONS, PROGRAMS, Run, facts_of, launched, skip_what_cannot_run
from tests.multi.programs.rehearsal_worker import KINDS, NUM_STEPS

WORKER = PROGRAMS / "rehearsal_worker.py"
KINDS_OF = {name: KINDS for name in ("cpu", "zero3")}
if os.environ.get("TRL_EXT_THOROUGH"):  # minutes more
    KINDS_OF |= {"zero1": KINDS, "zero2": KINDS} | {
        name: ("grpo", "reward") for name in ("zero2_offload", "zero3_offload")
    }


@pytest.fixture(scope="module")
def runs_under(tiny_model, tiny_reward_model, tmp_path_factory):
    """What a launch file's worker left behind; each file is launched once."""

    @functools.cache
    def runs(name):
        skip_what_cannot_run(name)
        folder = tmp_path_factory.mktemp(name) / "out"
        options = ("--reward_model", tiny_reward_model, "--kinds", *KINDS_OF[name])
        facts = facts_of(WORKER, launched(name, 2), tiny_model, folder, 2, *options)
        return {kind: Run(facts[kind], weights_in(folder / kind), folder / kind) for kind in facts}

    return runs


def weights_in(folder: Path) -> dict:
    files = [*folder.glob("*.safetensors"), *folder.glob("critic/*.safetensors")]
    return {f"{file.relative_to(folder)} {name}": w.float() for file in files for name, w in load_file(file).items()}


def logs_of(run: Run) -> list[str]:
    """As text, in which NaN is NaN. Without `total_flos`, for which transformers counts the weights of a model that
    ZeRO-3 happens to hold at that moment."""
    return [str({name: value for name, value in log.items() if name != "total_flos"}) for log in run.facts["logs"]]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS_OF.items() for kind in kinds])
def test_a_rehearsal_changes_no_bit(name, kind, runs_under):
    runs = runs_under(name)
    with_it, without = runs[f"{kind}_with"], runs[f"{kind}_without"]
    assert with_it.facts["world_size"] == 2
    assert with_it.facts["zero_stage"] == (int(name[4]) if name.startswith("zero") else 0)
    assert with_it.facts["packs"]
    assert (len(with_it.facts["rehearsed_s"]), len(without.facts["rehearsed_s"])) == (1, 0)
    print(f"the rehearsal took {with_it.facts['rehearsed_s'][0]:.2f} s")  # pytest -rP shows it
    assert len([entry for entry in without.facts["logs"] if "loss" in entry]) == NUM_STEPS
    assert logs_of(with_it) == logs_of(without)
    assert with_it.weights
    assert with_it.distance(without) == 0


@pytest.mark.nightly
def test_sums_of_gradients_in_a_buffer_of_their_own_are_dropped(tiny_model, tiny_reward_model, tmp_path):
    """In bf16 with fp32 sums ZeRO-2 adds to what it finds: without the drop a step would have the rehearsal in it."""
    skip_what_cannot_run("zero2")
    file, folder = tmp_path / "zero2.json", tmp_path / "out"
    settings = json.loads(JSONS["zero2"].read_text())
    file.write_text(json.dumps({**settings, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}))
    options = ("--reward_model", tiny_reward_model, "--kinds", "grpo", "--fp32_sums", file)
    facts = facts_of(WORKER, launched("cpu", 2), tiny_model, folder, 2, *options)
    with_it, without = (Run(facts[kind], weights_in(folder / kind), folder) for kind in ("grpo_with", "grpo_without"))
    assert (with_it.facts["zero_stage"], len(with_it.facts["rehearsed_s"])) == (2, 1)
    assert with_it.distance(without) == 0
