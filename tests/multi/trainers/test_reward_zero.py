"""Two processes with packed, unequal pairs train the reward model that one process of TRL trains, padded.

On the CPU in fp32, over gloo, on a tiny random Llama; six optimizer steps with margins, centring and clipping.
"""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.multi.launching import run_job, skip_what_cannot_run
from tests.nightly import daily, nightly

WEIGHT_TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6
SCORE_TOLERANCE = 1e-5
BUDGET = 110  # of the longest pairs, two do not fit; of the shortest, ten do


@pytest.fixture(scope="module")
def padded(tiny_reward_model, tmp_path_factory):
    """One process of TRL's trainer."""
    return run_job("reward", None, tmp_path_factory.mktemp("padded"), model=tiny_reward_model, library="trl")


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
    assert run.facts["eval_accuracy"] == pytest.approx(padded.facts["eval_accuracy"])


def test_the_padded_run_moves_the_weights_and_the_loss(padded, tiny_reward_model):
    before = load_file(tiny_reward_model / "model.safetensors")
    assert max((padded.weights[n] - before[n]).abs().max() for n in before) > 1e3 * WEIGHT_TOLERANCE
    assert min(padded.facts["loss"]) < 0.95 * max(padded.facts["loss"])


@pytest.mark.parametrize("name", daily(["cpu", "zero1", "zero2", "zero3"], "cpu"))
def test_two_processes_with_unequal_pairs_are_trls(name, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_job("reward", name, tmp_path, model=tiny_reward_model, max_tokens_per_forward=BUDGET)
    assert run.facts["world_size"] == 2
    assert run.facts["zero_stage"] == (int(name[4]) if name.startswith("zero") else 0)
    first, second = (said["pairs_of_forwards"] for said in run.ranks)
    assert len(first) == len(second), "every rank makes as many forwards"
    assert first != second, "the ranks hold different numbers of pairs, or this test proves nothing"
    check_against(padded, run)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["cpu", "zero3"])
def test_two_processes_without_a_budget_are_trls(name, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    check_against(padded, run_job("reward", name, tmp_path, model=tiny_reward_model))


# Where a forward more on one rank would hang by day.
@pytest.mark.parametrize(("name", "size"), [("zero3", 1), nightly("cpu", 1), nightly("cpu", 2)])
def test_two_processes_finish_a_stream_under_a_budget(name, size, tiny_reward_model, tmp_path):
    """Each rank plans its own pairs, and they agree on the number of forwards."""
    skip_what_cannot_run(name)
    options = dict(max_tokens_per_forward=BUDGET, stream=True, steps=4, sequence_parallel=size)
    run = run_job("reward", name, tmp_path, model=tiny_reward_model, **options)
    first, second = (said["pairs_of_forwards"] for said in run.ranks)
    assert len(first) == len(second)
    assert sum(first) + sum(second) == size * 4 * 8


BOUNDED = {"max_tokens_per_forward": BUDGET}
CHECKPOINTING = {"gradient_checkpointing": True}


# Launch file, processes, how many of them share a row, and other options.
@pytest.mark.parametrize(
    ("name", "num_processes", "size", "options"),
    [
        ("cpu", 2, 2, BOUNDED),
        nightly("zero3", 2, 2, {}),
        nightly("zero1", 2, 2, BOUNDED),
        nightly("zero2", 4, 2, CHECKPOINTING),
        nightly("zero3", 4, 2, BOUNDED | CHECKPOINTING),
        nightly("cpu", 4, 2, BOUNDED),
        nightly("cpu", 4, 4, CHECKPOINTING),
    ],
)
def test_processes_that_share_rows_are_trls(name, num_processes, size, options, padded, tiny_reward_model, tmp_path):
    skip_what_cannot_run(name)
    options = options | {"model": tiny_reward_model, "sequence_parallel": size}
    run = run_job("reward", name, tmp_path, num_processes, **options)
    forwards = [said["pairs_of_forwards"] for said in run.ranks]
    for first in range(0, num_processes, size):
        assert forwards[first : first + size] == [forwards[first]] * size, "a group makes the same forwards"
    assert run.facts["num_tokens"] == padded.facts["num_tokens"]
    check_against(padded, run)


@pytest.fixture(scope="module")
def padded_lora(tiny_reward_model, tmp_path_factory):
    """One process of TRL's trainer, with an adapter."""
    folder = tmp_path_factory.mktemp("padded_lora")
    return run_job("reward", None, folder, model=tiny_reward_model, library="trl", lora=True)


SHARED = CHECKPOINTING | {"sequence_parallel": 2}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("zero3", CHECKPOINTING),
        nightly("zero2", CHECKPOINTING),
        nightly("zero3", {}),
        nightly("cpu", SHARED),
        nightly("zero3", SHARED),
    ],
)
def test_a_lora_adapter_and_its_score_head_are_trls(name, others, padded_lora, tiny_reward_model, tmp_path):
    """Trained on two processes, saved, and loaded again: the scores are those of one process of TRL."""
    skip_what_cannot_run(name)
    theirs = padded_lora
    ours = run_job("reward", name, tmp_path, model=tiny_reward_model, lora=True, **BOUNDED, **others)
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


# Pairs and settings of evaluations in batches of 4; two processes fill the last batches with 3, 5 and 1 pairs.
EVALUATED = [(5, {}), (5, {"packing": False}), (5, {"max_tokens_per_forward": BUDGET}), (3, {}), (7, {})]


@pytest.fixture(scope="module")
def evaluated(tiny_reward_model, tmp_path_factory):
    """The evaluations by one process."""
    folder = tmp_path_factory.mktemp("evaluated")
    return run_job("reward evaluation", None, folder, model=tiny_reward_model, cases=EVALUATED).facts


@pytest.mark.parametrize("size", [1, 2])
def test_each_pair_of_an_evaluation_counts_once_on_two_processes(size, evaluated, tiny_reward_model, tmp_path):
    cases = [case for case in EVALUATED if case[1].get("packing", True) or size == 1]
    options = dict(model=tiny_reward_model, cases=cases, sequence_parallel=size)
    found = run_job("reward evaluation", "cpu", tmp_path, **options).facts
    expected = [metrics for case, metrics in zip(EVALUATED, evaluated, strict=True) if case in cases]
    for ours, alone in zip(found, expected, strict=True):
        assert {"eval_loss", "eval_accuracy", "eval_rules_agree_frac"} <= alone.keys()
        assert ours == pytest.approx(alone, abs=SCORE_TOLERANCE)
