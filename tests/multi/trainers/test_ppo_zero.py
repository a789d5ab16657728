"""Two processes under launch files that we ship train the actor and the critic of one plain process, to 1e-6.

The plain process pads, the launched ones pack and share prompts; every run checkpoints activations, takes a KL in the
reward and clips its gradients; a row that nothing could score is among them. All runs are on the CPU in fp32, over
gloo, on a tiny random Llama. A process trains its critics one after the other.
"""

import functools
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.faults.starting import IS_THOROUGH
from tests.multi.conftest import HIDDEN_SIZE
from tests.multi.jobs.ppo import CRITICS, IN_BFLOAT16
from tests.multi.launching import Run, distance, loaded, run_job, skip_what_cannot_run

TOLERANCE = 1e-6
CRITICS_OF = {
    "cpu": (*CRITICS, "reinforce_pp", "rloo", "grpo"),
    "zero1": ("adapter", "head"),
    "zero2": (*CRITICS, "rloo"),
    "zero2_offload": ("separate",),
    "zero3": ("head", "separate", "adapter", "reinforce_pp"),
}
if not IS_THOROUGH:  # the optimizer in host memory: tests/multi/trainers/test_zero.py
    CRITICS_OF = {"cpu": (*CRITICS, "reinforce_pp", "rloo"), "zero3": ("head", "separate")}
CASES = [(name, critic) for name, critics in CRITICS_OF.items() for critic in critics]
RESUMED = ("zero2", "zero3") if IS_THOROUGH else ("zero3",)


def saved_reward_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Save a LoRA reward model of the policy's backbone, with random weights."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    get_peft_model(scorer, lora).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def of_the_adapter_critic(tiny_model, tmp_path_factory):
    """An ensemble of two reward adapters."""
    folder = tmp_path_factory.mktemp("of_the_adapter_critic")
    return [saved_reward_adapter(tiny_model, folder / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def start(tiny_model, tiny_reward_model, of_the_adapter_critic, tmp_path_factory):
    """Starts the job and returns its run of every critic."""
    models = dict(model=tiny_model, reward_model=tiny_reward_model, adapters=list(map(str, of_the_adapter_critic)))

    def runs(launch, critics, num_processes=2, **options) -> dict[str, Run]:
        folder = tmp_path_factory.mktemp("ppo")
        run = run_job("ppo", launch, folder, num_processes, critics=critics, **models, **options)
        return {critic: run.part(critic) for critic in critics}

    return runs


@pytest.fixture(scope="module")
def plain(start):
    """One process, no launcher, padded batches."""
    return start(None, CRITICS_OF["cpu"])


# Launch file, processes, and how many of them share a row.
GROUPS = [("cpu", 2, 2)]
if IS_THOROUGH:
    GROUPS += [("zero1", 2, 2), ("zero2", 2, 2), ("zero3", 2, 2), ("cpu", 4, 2), ("zero2", 4, 4)]


@pytest.mark.parametrize(("name", "num_processes", "size"), GROUPS)
def test_processes_that_share_rows_train_what_one_does(name, num_processes, size, plain, start):
    skip_what_cannot_run(name)
    critics = CRITICS_OF[name] if IS_THOROUGH else ("head", "separate")
    accumulation = {"accumulation": 1} if num_processes == 4 else {}
    runs = start(name, critics, num_processes, packing=True, sequence_parallel=size, **accumulation)
    for critic, run in runs.items():
        print(f"largest weight difference: {run.distance(plain[critic]):.1e}")  # pytest -rP shows it
        assert set(run.facts["layers_per_forward"]) == {2}, "every checkpointed layer computes again in the backward"
        assert run.distance(plain[critic]) <= TOLERANCE
        for ours, theirs in zip(run.facts["logs"], plain[critic].facts["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert run.facts["unscored"] == plain[critic].facts["unscored"]
        assert run.facts["kl_coef"] == pytest.approx(plain[critic].facts["kl_coef"])
        assert run.facts["evaluated"] == pytest.approx(plain[critic].facts["evaluated"], rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def run_under(start):
    """The runs of two processes under a launch file; each file is launched once."""

    @functools.cache
    def runs(name):
        skip_what_cannot_run(name)
        saving = dict(save_strategy="steps", save_steps=1) if name in RESUMED else {}
        return start(name, CRITICS_OF[name], packing=True, **saving)

    return runs


def test_the_plain_runs_clip_every_step_and_leave_unscored_rows_out(plain):
    for run in plain.values():
        norms = [log["grad_norm"] for log in run.facts["logs"]]
        assert len(norms) == 3
        assert min(norms) > 2 * run.facts["max_grad_norm"]  # in a warm-up the critic's alone
    assert max(plain["head"].facts["unscored"]) > 0


def test_a_run_that_loses_its_clipping_would_be_noticed(plain, start):
    unclipped = start(None, CRITICS, max_grad_norm=1e9)
    for critic in CRITICS:
        for part in ("critic/", ""):
            weights, others = (
                {name: w for name, w in run[critic].weights.items() if name.startswith("critic/") == bool(part)}
                for run in (plain, unclipped)
            )
            assert distance(weights, others) > 1e3 * TOLERANCE, critic + part


@pytest.mark.parametrize(("name", "critic"), CASES)
def test_two_processes_train_what_one_does(name, critic, plain, run_under):
    expected, run = plain[critic], run_under(name)[critic]
    print(f"largest weight difference: {run.distance(expected):.1e}")  # pytest -rP shows it
    stage = int(name[4]) if name.startswith("zero") else 0
    assert run.facts["world_size"] == 2
    assert run.facts["zero_stage"] == stage
    assert (run.facts["num_split_parameters"] > 0) == (stage == 3)
    assert set(run.facts["layers_per_forward"]) == {2}, "every checkpointed layer computes again in the backward"
    assert run.facts["packs"]
    assert run.facts["prompts_of_steps"] == expected.facts["prompts_of_steps"]
    assert run.distance(expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "critic"), CASES)
def test_two_processes_log_what_one_does(name, critic, plain, run_under):
    expected, facts = plain[critic].facts, run_under(name)[critic].facts
    for ours, theirs in zip(facts["logs"], expected["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert facts["unscored"] == expected["unscored"]
    assert facts["kl_coef"] == pytest.approx(expected["kl_coef"])
    assert facts["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5, abs=1e-5)


def test_an_actor_saved_under_zero_3_is_a_plain_model_with_the_value_head_beside_it(run_under):
    run = run_under("zero3")["head"]
    assert not any("value_head" in name for name in run.weights)
    _, info = AutoModelForCausalLM.from_pretrained(run.folder, output_loading_info=True)
    assert not any(info.values())
    shapes = {name: tuple(w.shape) for name, w in loaded(run.folder / "critic" / "score.safetensors").items()}
    assert shapes == {"weight": (1, HIDDEN_SIZE), "bias": (1,)}


@pytest.fixture(scope="module")
def resumed(run_under, start):
    """The runs of a launch file, from their first optimizer step on: in the middle of an update of two epochs."""

    @functools.cache
    def runs(name):
        stopped = next(iter(run_under(name).values())).folder.parent
        return start(name, CRITICS_OF[name], packing=True, resume_from=stopped)

    return runs


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "critic"), [case for case in CASES if case[0] in RESUMED])
def test_a_run_resumed_inside_an_update_ends_with_the_same_bits(name, critic, run_under, resumed):
    whole, run = run_under(name)[critic], resumed(name)[critic]
    assert len(whole.facts["prompts_of_steps"]) == 2
    assert len(run.facts["prompts_of_steps"]) == 1, "the rollouts of the first update were not taken up"
    assert run.distance(whole) == 0
    assert run.facts["kl_coef"] == whole.facts["kl_coef"]


def test_bfloat16_trains_under_zero3(tiny_model, tiny_reward_model, tmp_path):
    """A float32 value head beside weights that are split in bfloat16 stopped DeepSpeed at its start."""
    skip_what_cannot_run("zero3")
    adapter = saved_reward_adapter(tiny_model, tmp_path / "adapter", 0)
    models = dict(model=tiny_model, reward_model=tiny_reward_model, adapter=adapter)
    names = list(IN_BFLOAT16) if IS_THOROUGH else ["head", "adapter"]
    for run in run_job("ppo in bfloat16", "zero3", tmp_path / "out", names=names, **models).facts.values():
        assert run["zero_stage"] == 3
        assert run["dtypes"] == ["torch.bfloat16"]
        assert len(run["value_losses"]) == 2
        # The same episodes twice: the critic has learned from the first step.
        assert 0 < run["value_losses"][1] < run["value_losses"][0]
