"""Evaluation and prediction of a RewardTrainer: TRL's numbers, and those that rules add."""

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests.nightly import daily
from tests.preferences import pairs, reward_model
from tests.reward_trainers import chat_tokenizer, trainer, warnings_of
from trl_ext import RuleSet
from trl_ext.rewards import Length

TOLERANCE = 1e-5
# 11 pairs in batches of 4: the last batch is short.
HELD_OUT = pairs(11, seed=1)
WAYS = {
    "packed": {},
    "packed, own prompts": dict(share_prompt=False),
    "budget": dict(max_tokens_per_forward=120),
    "padded": dict(packing=False),
}
TRLS = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens")


every_way = pytest.mark.parametrize("way", daily(WAYS, "packed", "budget", "padded"))


class Seen:
    """A compute_metrics that remembers what it is called with."""

    def __init__(self):
        self.predictions: list[np.ndarray] = []
        self.labels: list = []

    def __call__(self, given):
        self.predictions.append(given.predictions)
        self.labels.append(given.label_ids)
        return {"first_score": float(given.predictions[0, 0])}


def trls_and_ours(tmp_path, way, batch=4, **arguments):
    """The same evaluation by both: the metrics that TRL logs, what compute_metrics saw, and the trainer's log.

    Args:
        batch: Pairs of TRL's batches; ours have 4.
    """
    found = []
    for library, changes in ((trl, {"per_device_eval_batch_size": batch}), (trl_ext, WAYS[way])):
        seen = Seen()
        subject = trainer(tmp_path, library=library, compute_metrics=seen, **arguments, **changes)
        subject.evaluate()
        found.append((subject.state.log_history[-1], seen))
    return found


# As in TRL --------------------------------------------------------------------------------------------------------


HELD_OUTS = {
    "margin": pairs(12, seed=1, margin=True),
    "no margin": HELD_OUT,
    "stream": pairs(12, seed=1).to_iterable_dataset(),
}


@pytest.mark.parametrize(
    ("way", "rows"), [*((way, "margin") for way in WAYS), ("packed", "no margin"), ("packed", "stream")]
)
def test_metrics_are_trls_over_a_single_batch(rows, way, tmp_path):
    """In several batches TRL logs means of the batches' means, minima and maxima."""
    options = dict(eval_dataset=HELD_OUTS[rows], center_rewards_coefficient=0.1)
    (theirs, _), (ours, _) = trls_and_ours(tmp_path, way, batch=16, **options)
    for name in TRLS:
        assert ours[f"eval_{name}"] == pytest.approx(theirs[f"eval_{name}"], abs=TOLERANCE), name
    assert "eval_score_length_correlation" in ours and not [name for name in ours if "rules" in name]


@every_way
def test_predictions_and_what_compute_metrics_sees_are_trls(way, tmp_path):
    """One call, scores [batch after batch: chosen, then rejected], no labels. TRL cuts a short last batch in half."""
    (theirs, their_calls), (ours, our_calls) = trls_and_ours(tmp_path, way, eval_dataset=HELD_OUT)
    assert len(our_calls.predictions) == len(their_calls.predictions) == 1
    assert our_calls.labels == their_calls.labels
    (expected,), (found,) = their_calls.predictions, our_calls.predictions
    assert expected.std() > 1000 * TOLERANCE, "all scores are alike, so nothing is compared"
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert np.abs(found - expected).max() <= TOLERANCE
    assert ours["eval_first_score"] == pytest.approx(theirs["eval_first_score"], abs=TOLERANCE)
    subject = trainer(tmp_path, eval_dataset=HELD_OUT, **WAYS[way])
    predicted = subject.predict(subject.eval_dataset)
    assert np.abs(predicted.predictions - expected).max() <= TOLERANCE
    assert predicted.metrics["test_loss"] == pytest.approx(theirs["eval_loss"], abs=TOLERANCE)


def test_several_evaluation_datasets_are_told_apart(tmp_path):
    sets = {"short": pairs(4, seed=2), "long": pairs(8, seed=3)}
    subject = trainer(tmp_path, eval_dataset=sets)
    together = subject.evaluate()
    for name, dataset in sets.items():
        alone = trainer(tmp_path, eval_dataset=dataset).evaluate()
        assert together[f"eval_{name}_loss"] == pytest.approx(alone["eval_loss"], abs=TOLERANCE)
        assert f"eval_{name}_score_length_correlation" in together
    assert together["eval_short_loss"] != together["eval_long_loss"]


def test_evaluation_between_steps_leaves_training_alone(tmp_path):
    settings = dict(max_steps=3, logging_steps=1, eval_steps=1)
    losses = []
    for strategy in ("no", "steps"):
        subject = trainer(tmp_path, pairs(16), eval_dataset=HELD_OUT, eval_strategy=strategy, **settings)
        subject.train()
        losses.append([entry["loss"] for entry in subject.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0] == losses[1]


# Other datasets ---------------------------------------------------------------------------------------------------


@every_way
def test_a_raw_or_a_prepared_dataset_can_be_given_to_evaluate(way, tmp_path):
    subject = trainer(tmp_path, eval_dataset=HELD_OUT, **WAYS[way])
    expected = subject.evaluate()["eval_loss"]
    assert subject.evaluate(subject.eval_dataset)["eval_loss"] == expected
    assert subject.evaluate(subject.train_dataset)["eval_loss"] != expected
    assert subject.evaluate()["eval_loss"] == expected
    other = trainer(tmp_path, eval_dataset=pairs(4), **WAYS[way])
    assert other.evaluate(HELD_OUT)["eval_loss"] == pytest.approx(expected, abs=TOLERANCE)
    assert other.evaluate({"a": HELD_OUT})["eval_a_loss"] == pytest.approx(expected, abs=TOLERANCE)


def test_a_dataset_given_to_evaluate_is_fitted_to_length(tmp_path, caplog):
    # HELD_OUT has sides of up to 40 tokens.
    subject = trainer(tmp_path, max_length=30)
    caplog.clear()
    subject.evaluate(HELD_OUT)
    (warning,) = warnings_of(caplog)
    assert "eval_dataset" in warning and "11 pairs" in warning and "max_length=30" in warning


# Rules ------------------------------------------------------------------------------------------------------------


def longer_is_better() -> RuleSet:
    """1 for ten words and more, falling to 0 for none."""
    return RuleSet([Length(low=10, slack=10, unit="words")])


def score_of_first_token(model, favourite: int) -> None:
    """Make the model score a side by whether it ends in the token `favourite`: 1 for it, -1 for others, about."""
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings.fill_(0.0)
        embeddings[:, 0] = -1.0
        embeddings[favourite, 0] = 1.0
        model.score.weight.zero_()
        model.score.weight[0, 0] = 1.0


@pytest.fixture
def likes_w9(tmp_path):
    """Settings of a trainer whose model prefers the side that ends in w9."""
    model = reward_model(tmp_path / "likes")
    score_of_first_token(model, favourite=9)
    # Every side ends in EOS; with EOS as the pad token, the token before it is scored.
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return dict(model=model, processing_class=tokenizer)


def answered(chosen, rejected, **columns):
    return {"prompt": "w5 ", "chosen": chosen, "rejected": rejected, **columns}


# The model is right in the first, second and fourth pair; the longer side is the chosen one in the first three.
FOUR = [
    answered("w6 w7 w9", "w6"),
    answered("w6 w9", "w7"),
    answered("w6 w7 w8", "w9"),
    answered("w9", "w6 w7 w8"),
]


@every_way
def test_rules_tell_accuracy_where_they_agree_and_where_they_do_not(way, likes_w9, tmp_path):
    held_out = Dataset.from_list(FOUR)
    subject = trainer(tmp_path, rules=longer_is_better(), eval_dataset=held_out, **likes_w9, **WAYS[way])
    assert "rule_gap" not in subject.train_dataset.column_names
    metrics = subject.evaluate()
    assert subject.state.log_history[-1]["eval_accuracy"] == 0.75
    assert metrics["eval_accuracy_rules_agree"] == pytest.approx(2 / 3)
    assert metrics["eval_accuracy_rules_disagree"] == 1.0
    assert metrics["eval_rules_agree_frac"] == 0.75


def test_a_column_of_rule_gaps_does_the_same(likes_w9, tmp_path):
    gaps = [1.0, None, -1.0, 0.0]
    held_out = Dataset.from_list([row | {"rule_gap": gap} for row, gap in zip(FOUR, gaps, strict=True)])
    metrics = trainer(tmp_path, eval_dataset=held_out, **likes_w9).evaluate()
    assert metrics["eval_accuracy_rules_agree"] == 1.0
    assert metrics["eval_accuracy_rules_disagree"] == 0.0
    assert metrics["eval_rules_agree_frac"] == 0.5
    subject = trainer(tmp_path, rules=longer_is_better(), **likes_w9)
    assert subject.evaluate(held_out)["eval_rules_agree_frac"] == 0.75, "rules win over a column of older gaps"


def test_rules_judge_every_one_of_several_datasets(likes_w9, tmp_path):
    """Whatever its name: a part of the training pairs, evaluated beside held-out ones, is often called "train"."""
    sets = {"train": Dataset.from_list(FOUR[:3]), "held_out": Dataset.from_list(FOUR)}
    metrics = trainer(tmp_path, rules=longer_is_better(), eval_dataset=sets, **likes_w9).evaluate()
    assert metrics["eval_held_out_rules_agree_frac"] == 0.75
    assert metrics["eval_train_rules_agree_frac"] == 1.0


def test_a_stream_cannot_be_judged_by_rules_and_says_so(tmp_path, caplog):
    trainer(tmp_path, rules=longer_is_better(), eval_dataset=HELD_OUT.to_iterable_dataset())
    (warning,) = warnings_of(caplog)
    assert "eval_dataset is a stream, to which the rules are not applied" in warning


def test_scores_that_follow_length_are_told(likes_w9, tmp_path):
    """The model likes w9, on which every long side ends here."""
    rows = [answered("w6 w7 w8 w9", "w6"), answered("w6 w7 w9", "w7")]
    metrics = trainer(tmp_path, eval_dataset=Dataset.from_list(rows), **likes_w9).evaluate()
    # Ranks of scores 3.5, 3.5, 1.5, 1.5 and of lengths 4, 3, 1.5, 1.5: covariance 4 over the root of 4 * 4.5.
    assert metrics["eval_score_length_correlation"] == pytest.approx(4 / (4 * 4.5) ** 0.5)
