"""Two processes under the launch files that we ship train the same weights as one plain process, to 1e-6.

DDP and ZeRO-3 with the optimizer in host memory in `make test`, the stages between in `make nightly`.

The plain process pads, the launched ones pack and share prompts: what holds here holds for both at once. All runs are
on the CPU in fp32, over gloo, on a tiny random Llama. DeepSpeed compiles helpers in its first runs on a machine, a
minute each; `tests/compiled_helpers.py` keeps them.
"""

import json

import pytest
from safetensors.torch import load_file

from tests.multi.conftest import HIDDEN_SIZE
from tests.multi.launching import JSONS, YAMLS, Run, distance, run_job, skip_what_cannot_run
from tests.nightly import daily, nightly

TOLERANCE = 1e-6


@pytest.fixture(scope="session")
def plain(tiny_model, tmp_path_factory):
    """One process, no launcher, padded batches."""
    return run_job("grpo", None, tmp_path_factory.mktemp("plain"), model=tiny_model)


def check_against(plain: Run, run: Run, name: str) -> None:
    print(f"largest weight difference: {run.distance(plain):.1e}")  # pytest -rP shows it
    stage = int(name[4]) if name.startswith("zero") else 0
    assert run.facts["world_size"] == 2
    assert run.facts["zero_stage"] == stage
    assert (run.facts["num_split_parameters"] > 0) == (stage == 3)
    assert run.facts["optimizer"] == ("DeepSpeedCPUAdam" if name.endswith("_offload") else "AdamW")
    assert run.facts["prompts_of_steps"] == plain.facts["prompts_of_steps"]
    assert min(run.facts["padded_over_forwarded"]) > 1
    assert run.distance(plain) <= TOLERANCE


def test_the_plain_run_moves_the_weights_and_clips_every_step(plain, tiny_model):
    assert distance(plain.weights, load_file(tiny_model / "model.safetensors")) > 1e4 * TOLERANCE
    assert len(plain.facts["grad_norms"]) == 3
    assert min(plain.facts["grad_norms"]) > 3 * plain.facts["max_grad_norm"]


def test_a_run_that_loses_its_clipping_would_be_noticed(plain, tiny_model, tmp_path):
    unclipped = run_job("grpo", None, tmp_path, model=tiny_model, max_grad_norm=1e9)
    assert unclipped.distance(plain) > 1e3 * TOLERANCE


def test_single_gpu_yaml_changes_nothing(plain, tiny_model, tmp_path):
    run = run_job("grpo", "single_gpu", tmp_path, 1, model=tiny_model)
    assert run.facts["world_size"] == 1
    assert run.distance(plain) == 0


# multi_gpu.yaml says word for word what cpu.yaml says (tests/light/test_configs.py). ZeRO-3's runs in
# test_ppo_zero.py, with the optimizer in host memory by its JSON below, and FSDP2's in test_fsdp2.py.
@pytest.mark.parametrize("name", daily([name for name in YAMLS if name.startswith(("cpu", "zero"))], "cpu"))
def test_two_processes_train_what_one_does(name, plain, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    check_against(plain, run_job("grpo", name, tmp_path, model=tiny_model, packing=True), name)


def test_two_processes_share_what_completions_begin_with_and_train_what_one_does(tiny_model, tmp_path):
    plain = run_job("grpo", None, tmp_path / "plain", model=tiny_model, forked=True)
    run = run_job("grpo", "cpu", tmp_path / "out", model=tiny_model, forked=True, packing=True, max_tokens=240)
    check_against(plain, run, "cpu")
    # A row has 44 to 59 tokens: a group is planned into few forwards, each of which shares what its rows begin with.
    assert min(run.facts["padded_over_forwarded"]) > 2


# Each says what the YAML of its name says (tests/light/test_configs.py).
@pytest.mark.parametrize("name", daily(JSONS, "zero3_offload"))
def test_two_processes_train_what_one_does_with_a_deepspeed_file(name, plain, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_job("grpo", "cpu", tmp_path, model=tiny_model, packing=True, deepspeed=JSONS[name])
    check_against(plain, run, name)
    # Where the file says "auto" the model's width has taken its place.
    assert run.facts["reduce_bucket_size"] == HIDDEN_SIZE**2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_gradients_that_are_sent_while_backward_goes_on_are_the_same(name, plain, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    engine = json.loads(JSONS[name].read_text())
    engine["zero_optimization"]["overlap_comm"] = True
    (tmp_path / "overlapping.json").write_text(json.dumps(engine))
    options = dict(model=tiny_model, packing=True, deepspeed=tmp_path / "overlapping.json")
    check_against(plain, run_job("grpo", "cpu", tmp_path / "out", **options), name)


@pytest.mark.parametrize(
    ("num_processes", "loss_type", "name"),
    [(2, "grpo", "cpu"), nightly(4, "dapo", "cpu"), nightly(4, "grpo", "zero3"), nightly(4, "dapo", "zero2")],
)
def test_processes_share_out_the_rows_that_have_a_gradient(num_processes, loss_type, name, tiny_model, tmp_path):
    """Without KL: rows of groups with equal rewards stay out, and the others change processes."""
    options = dict(model=tiny_model, beta=0.0, loss_type=loss_type, num_prompts=6)
    plain = run_job("grpo", None, tmp_path / "plain", **options)
    run = run_job("grpo", name, tmp_path / "out", num_processes, packing=True, **options)
    assert run.facts["world_size"] == num_processes
    assert all(0.3 < skipped < 0.7 for skipped in run.facts["skipped_rows_frac"])
    assert run.facts["prompts_of_steps"] == plain.facts["prompts_of_steps"]
    assert run.distance(plain) <= TOLERANCE


@pytest.mark.parametrize("name", daily(["cpu", "zero2", "zero3"], "cpu"))
def test_completions_of_two_processes_whose_rows_end_at_different_tokens_are_trls(name, tiny_model, tmp_path):
    ranks = run_job("generation", name, tmp_path, model=tiny_model).ranks
    assert all(said["trl_ext"] == said["trl"] and len(said["trl"]) == 3 for said in ranks)
    assert ranks[0] != ranks[1]
