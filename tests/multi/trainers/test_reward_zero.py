"""Two processes with packed, unequal pairs train the reward model that one process of TRL trains, padded.

On the CPU in fp32, over gloo, on a tiny random Llama; six optimizer steps with margins, centring and clipping.
"""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import PROGRAMS, launched, run_worker, skip_what_cannot_run
from tests.multi.warm import warm_python

WORKER = PROGRAMS / "reward_worker.py"
WEIGHT_TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6
SCORE_TOLERANCE = 1e-5
ADAPTER = "adapter_model.safetensors"
BUDGET = 110  # of the longest pairs, two do not fit; of the shortest, ten do


@pytest.fixture(scope="module")
def padded(tiny_reward_model, tmp_path_factory):
    """One process of TRL's trainer."""
    folder = tmp_path_factory.mktemp("padded") / "out"
    return run_worker(WORKER, [warm_python()], tiny_reward_model, folder, 1, "--library", "trl")


def scores_of(model) -> torch.Tensor:
    """Two sequences' scores by a model as transformers loads it."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(4, 44).view(2, 20)).logits


def saved_scores(folder) -> torch.Tensor:
    return scores_of(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32))


def check_against(padded, run):
    print(f"largest weight difference: {run.distance(padded):.1e}")  # pytest -rP shows it
    for name in ("loss", "accuracy", "margin"):
        assert run.facts[name] == pytest.approx(padded.facts[name], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE), name
    assert run.facts["grad_norm"] == pytest.approx(padded.facts["grad_norm"], rel=GRADIENT_TOLERANCE)
    assert run.distance(padded) <= WEIGHT_TOLERANCE
    assert (saved_scores(run.folder) - saved_scores(padded.folder)).abs().max() <= SCORE_TOLERANCE
    assert run.facts["evaluated"]["eval_accuracy"] == padded.facts["evaluated"]["eval_accuracy"]


def test_the_padded_run_moves_the_weights_and_the_loss(padded, tiny_reward_model):
    before = load_file(tiny_reward_model / "model.safetensors")
    assert max((padded.weights[n] - before[n]).abs().max() for n in before) > 1e3 * WEIGHT_TOLERANCE
    assert min(padded.facts["loss"]) < 0.95 * max(padded.facts["loss"])


@pytest.mark.parametrize("name", ["cpu", *(["zero1", "zero2"] if IS_THOROUGH else []), "zero3"])
def test_two_processes_with_unequal_pairs_are_trls(name, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    options = ("--budget", BUDGET)
    run = run_worker(WORKER, launched(name, 2), tiny_reward_model, tmp_path / "out", 2, *options)
    assert run.facts["world_size"] == 2
    assert run.facts["zero_stage"] == (int(name[4]) if name.startswith("zero") else 0)
    first, second = run.facts["pairs_of_forwards"]
    assert len(first) == len(second), "every rank makes as many forwards"
    assert first != second, "the ranks hold different numbers of pairs, or this test proves nothing"
    check_against(padded, run)


@pytest.mark.parametrize("name", [*(["cpu"] if IS_THOROUGH else []), "zero3"])
def test_two_processes_without_a_budget_are_trls(name, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_worker(WORKER, launched(name, 2), tiny_reward_model, tmp_path / "out", 2)
    check_against(padded, run)


# Launch file, processes, how many of them share a row, and other options.
GROUPS = [("cpu", 2, 2, ["--budget", BUDGET])]
STREAMS = [("zero3", 1)]  # where a forward more on one rank would hang
if IS_THOROUGH:
    STREAMS += [("cpu", 1), ("cpu", 2)]
    GROUPS += [
        ("zero3", 2, 2, []),
        ("zero1", 2, 2, ["--budget", BUDGET]),
        ("zero2", 4, 2, ["--checkpointing"]),
        ("zero3", 4, 2, ["--budget", BUDGET, "--checkpointing"]),
        ("cpu", 4, 2, ["--budget", BUDGET]),
        ("cpu", 4, 4, ["--checkpointing"]),
    ]


@pytest.mark.parametrize(("name", "size"), STREAMS)
def test_two_processes_finish_a_stream_under_a_budget(name, size, tiny_reward_model, tmp_path):
    """Each rank plans its own pairs, and they agree on the number of forwards."""
    skip_what_cannot_run(name)
    options = ("--budget", BUDGET, "--stream", "--steps", 4, "--sequence_parallel", size)
    run = run_worker(WORKER, launched(name, 2), tiny_reward_model, tmp_path / "out", 2, *options)
    first, second = run.facts["pairs_of_forwards"]
    assert len(first) == len(second)
    assert sum(first) + sum(second) == size * 4 * 8


@pytest.mark.parametrize(("name", "num_processes", "size", "options"), GROUPS)
def test_processes_that_share_rows_are_trls(name, num_processes, size, options, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    options = (*options, "--sequence_parallel", size)
    run = run_worker(
        WORKER, launched(name, num_processes), tiny_reward_model, tmp_path / "out", num_processes, *options
    )
    forwards = run.facts["pairs_of_forwards"]
    for first in range(0, num_processes, size):
        assert forwards[first : first + size] == [forwards[first]] * size, "a group makes the same forwards"
    assert run.facts["num_tokens"] == padded.facts["num_tokens"]
    check_against(padded, run)


@pytest.fixture(scope="module")
def padded_lora(tiny_reward_model, tmp_path_factory):
    """One process of TRL's trainer, with an adapter."""
    folder = tmp_path_factory.mktemp("padded_lora") / "out"
    options = ("--library", "trl", "--lora")
    return run_worker(WORKER, [warm_python()], tiny_reward_model, folder, 1, *options, weights=ADAPTER)


SHARED = ["--checkpointing", "--sequence_parallel", 2]
ADAPTERS: list = [("zero3", ["--checkpointing"])]
if IS_THOROUGH:
    ADAPTERS += [("zero2", ["--checkpointing"]), ("zero3", []), ("cpu", SHARED), ("zero3", SHARED)]


@pytest.mark.parametrize(("name", "others"), ADAPTERS)
def test_a_lora_adapter_and_its_score_head_are_trls(name, others, padded_lora, tiny_reward_model, tmp_path):
    """Trained on two processes, saved, and loaded again: the scores are those of one process of TRL."""
    skip_what_cannot_run(name)
    theirs = padded_lora
    options = ("--budget", BUDGET, "--lora", *others)
    ours = run_worker(WORKER, launched(name, 2), tiny_reward_model, tmp_path / "out", 2, *options, weights=ADAPTER)
    head = next(name for name in ours.weights if "score" in name)
    before = load_file(tiny_reward_model / "model.safetensors")["score.weight"]
    assert (ours.weights[head] - before).abs().max() > 1e3 * WEIGHT_TOLERANCE, "the head was not trained"
    print(f"largest adapter difference: {ours.distance(theirs):.1e}")
    assert ours.distance(theirs) <= WEIGHT_TOLERANCE
    assert ours.facts["loss"] == pytest.approx(theirs.facts["loss"], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    scores = [adapted_scores(tiny_reward_model, run.folder) for run in (theirs, ours)]
    assert (scores[0] - scores[1]).abs().max() <= SCORE_TOLERANCE


def adapted_scores(base, adapter) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    return scores_of(PeftModel.from_pretrained(model, adapter))
