"""Two processes that rehearse before step 1 train the bits of two that do not, under DDP and ZeRO-3; at night also
under ZeRO-1 and 2 and the offload files, and with every kind of model."""

import functools
import json

import pytest
from safetensors.torch import load_file

from tests.faults.starting import IS_THOROUGH
from tests.multi.jobs.rehearsal import KINDS
from tests.multi.jobs.shared import NUM_STEPS
from tests.multi.launching import JSONS, Run, distance, run_job, skip_what_cannot_run

KINDS_OF = {"cpu": ("grpo", "reward"), "zero3": ("ppo",)}
if IS_THOROUGH:  # minutes more
    KINDS_OF = {name: KINDS for name in ("cpu", "zero1", "zero2", "zero3")} | {
        name: ("grpo", "reward") for name in ("zero2_offload", "zero3_offload")
    }


@pytest.fixture(scope="module")
def runs_under(tiny_model, tiny_reward_model, tmp_path_factory):
    """What a launch file's worker left behind; each file is launched once."""

    @functools.cache
    def runs(name):
        skip_what_cannot_run(name)
        options = dict(model=tiny_model, reward_model=tiny_reward_model, kinds=KINDS_OF[name])
        return run_job("rehearsal", name, tmp_path_factory.mktemp(name), **options)

    return runs


def logs_of(run: Run) -> list[str]:
    """As text, in which NaN is NaN. Without `total_flos`, for which transformers counts the weights of a model that
    ZeRO-3 happens to hold at that moment."""
    return [str({name: value for name, value in log.items() if name != "total_flos"}) for log in run.facts["logs"]]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS_OF.items() for kind in kinds])
def test_a_rehearsal_changes_no_bit(name, kind, runs_under):
    runs = runs_under(name)
    with_it, without = runs.part(f"{kind}_with"), runs.part(f"{kind}_without")
    assert with_it.facts["world_size"] == 2
    assert with_it.facts["zero_stage"] == (int(name[4]) if name.startswith("zero") else 0)
    assert with_it.facts["packs"]
    assert (with_it.facts["num_rehearsals"], without.facts["num_rehearsals"]) == (1, 0)
    assert len([entry for entry in without.facts["logs"] if "loss" in entry]) == NUM_STEPS
    assert logs_of(with_it) == logs_of(without)
    assert with_it.distance(without) == 0


@pytest.mark.nightly
def test_sums_of_gradients_in_a_buffer_of_their_own_are_dropped(tiny_model, tiny_reward_model, tmp_path):
    """In bf16 with fp32 sums ZeRO-2 adds to what it finds: without the drop a step would have the rehearsal in it."""
    skip_what_cannot_run("zero2")
    file, folder = tmp_path / "zero2.json", tmp_path / "out"
    settings = json.loads(JSONS["zero2"].read_text())
    file.write_text(json.dumps({**settings, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}))
    options = dict(bf16=True, deepspeed=file, model_init_kwargs={"dtype": "bfloat16"})
    models = dict(model=tiny_model, reward_model=tiny_reward_model)
    run = run_job("rehearsal", "cpu", folder, kinds=["grpo"], **models, **options)
    with_it = run.part("grpo_with")
    assert (with_it.facts["zero_stage"], with_it.facts["num_rehearsals"]) == (2, 1)
    weights = (load_file(folder / name / "model.safetensors") for name in ("grpo_with", "grpo_without"))
    assert distance(*weights) == 0
