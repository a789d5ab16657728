"""Twenty optimizer steps of trl_ext.RewardTrainer are those of trl.RewardTrainer: loss, metrics, every gradient."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import trl
from peft import LoraConfig

import trl_ext
from tests import tiny
from tests.preferences import Gradients, pairs, reward_model

torch.set_num_threads(1)

NUM_STEPS = 20
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-6
METRICS = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens")
OURS = {
    "packed": {"packing": True},
    "packed, own prompts": {"packing": True, "share_prompt": False},
    "budget": {"max_tokens_per_forward": 130},
    "large budget": {"max_tokens_per_forward": 4096},
}


def run(library, folder, dataset, peft=False, family="llama", **changes):
    """Log entries and gradients of every step."""
    gradients = Gradients()
    settings = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        learning_rate=1e-4,
        # Adam divides by the root of the squared gradient: with the usual 1e-8 rounding noise would move weights.
        adam_epsilon=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = library.RewardTrainer(
        reward_model(folder, family),
        library.RewardConfig(**settings | changes),
        train_dataset=dataset,
        processing_class=tiny.tokenizer(),
        callbacks=[gradients],
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear") if peft else None,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], gradients.steps


@cache
def of_trl(margin=False, **options):
    """TRL's log and gradients, computed once for all that is compared with them."""
    with tempfile.TemporaryDirectory() as folder:
        return run(trl, Path(folder), pairs(count=96, margin=margin), **options)


def check_equal(theirs, ours, metrics=METRICS):
    (their_log, their_gradients), (our_log, our_gradients) = theirs, ours
    assert len(their_log) == len(our_log) == len(their_gradients) == len(our_gradients) == NUM_STEPS
    for their, our in zip(their_log, our_log, strict=True):
        for name in metrics:
            assert our[name] == pytest.approx(their[name], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE), name
    assert worst(their_gradients, our_gradients) <= GRADIENT_TOLERANCE


def worst(theirs, ours) -> float:
    """Largest error of a step's gradient, relative to its norm, over the steps."""
    errors = []
    for their, our in zip(theirs, ours, strict=True):
        assert their.keys() == our.keys()
        square = sum((our[name] - their[name]).square().sum() for name in their)
        errors.append((square / sum(g.square().sum() for g in their.values())).sqrt().item())
    print(f"largest relative gradient error: {max(errors):.1e}")  # pytest -rP shows it
    return max(errors)


def comparable(way, accumulation):
    """TRL logs the mean over micro-batches of their extremes; under a budget there is one extreme a step."""
    apart = ("min_reward", "max_reward") if "budget" in way and accumulation > 1 else ()
    return [name for name in METRICS if name not in apart]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("way", OURS)
def test_steps_are_trls(way, accumulation, tmp_path):
    # Divides into whole steps: where an epoch's last one is short, TRL weights its micro-batches, not its pairs.
    dataset = pairs(count=96)
    options = dict(gradient_accumulation_steps=accumulation)
    ours = run(trl_ext, tmp_path, dataset, **options, **OURS[way])
    check_equal(of_trl(**options), ours, comparable(way, accumulation))


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize(
    "options",
    [
        dict(center_rewards_coefficient=0.1),
        dict(gradient_checkpointing=False),
        dict(max_grad_norm=0.05),
        dict(peft=True),
        dict(peft=True, gradient_checkpointing=False),
        # One pair's gradient is the small difference of two large ones: four of them lift it out of the rounding.
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=4),
        dict(family="qwen3"),
        dict(family="gemma3"),
        dict(family="mistral_window"),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_steps_are_trls_under_its_options(options, way, tmp_path):
    dataset = pairs(count=96, margin=True)
    ours = run(trl_ext, tmp_path, dataset, **options, **OURS[way])
    check_equal(of_trl(margin=True, **options), ours, comparable(way, options.get("gradient_accumulation_steps", 1)))


def test_a_short_last_step_is_trls_without_a_budget(tmp_path):
    """TRL gives its micro-batches equal weight, whatever they hold, and so do we; only a budget counts pairs."""
    dataset = pairs(count=30)
    options = dict(gradient_accumulation_steps=4)
    check_equal(run(trl, tmp_path, dataset, **options), run(trl_ext, tmp_path, dataset, **options, packing=True))


def test_the_comparison_can_fail(tmp_path):
    dataset = pairs(count=96, margin=True)
    ours = run(trl_ext, tmp_path, dataset.remove_columns("margin"), packing=True)
    theirs = of_trl(margin=True)
    with pytest.raises(AssertionError):
        check_equal(theirs, ours)


def test_a_budget_cuts_a_step_into_several_forwards(tmp_path, monkeypatch):
    forwards = []
    original = trl_ext.RewardTrainer._packed_loss

    def count(self, model, rows, num_items):
        forwards.extend(row.flat.num_tokens for row in rows)
        return original(self, model, rows, num_items)

    monkeypatch.setattr(trl_ext.RewardTrainer, "_packed_loss", count)
    run(trl_ext, tmp_path, pairs(count=96), max_tokens_per_forward=130)
    assert len(forwards) > NUM_STEPS
    assert max(forwards) <= 130


def test_accumulated_micro_batches_share_a_forward_where_the_budget_allows(tmp_path, monkeypatch):
    forwards = []
    original = trl_ext.RewardTrainer._packed_loss

    def count(self, model, rows, num_items):
        forwards.extend(row.num_pairs for row in rows)
        return original(self, model, rows, num_items)

    monkeypatch.setattr(trl_ext.RewardTrainer, "_packed_loss", count)
    run(trl_ext, tmp_path, pairs(count=96), max_tokens_per_forward=4096, gradient_accumulation_steps=4)
    assert forwards == [16] * NUM_STEPS
