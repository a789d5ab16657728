"""Numbers out of range and unknown words are refused by name, and what TRL uses meaningfully is taken."""

import ast
import json
import math
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_ext.errors import ConfigError
from trl_ext.trainers.settings.values import (
    CHOICES,
    RANGES,
    Range,
    check_deepspeed_file,
    check_numbers,
    check_settings,
)

NAN, INF = math.nan, math.inf


def args(**changes):
    """Training arguments on a CPU, as far as the checks look."""
    return SimpleNamespace(**{"fp16": False, "device": SimpleNamespace(type="cpu"), **changes})


def refusal(check, *given):
    with pytest.raises(ConfigError) as caught:
        check(*given)
    return str(caught.value)


OUT_OF_RANGE = {
    (-1e-6, NAN, INF): "learning_rate",
    (-0.1, NAN, INF): "weight_decay",
    (-0.1, 1.0, NAN): "adam_beta1",
    (-1e-8,): "adam_epsilon",
    (-1.0, NAN): "max_grad_norm",
    (-1, NAN): "warmup_steps",
    (0, -2): "max_steps num_generations",
    (0, -1): "per_device_train_batch_size gradient_accumulation_steps save_total_limit max_completion_length "
    "num_iterations num_mini_batches repetition_penalty",
    (0.0, -1.0, NAN, INF): "temperature",
    (0.0, -0.1, 1.5, NAN): "top_p",
    (-0.1, 1.5, NAN): "min_p",
    (-0.5, NAN, INF): "beta",
    (-0.1, NAN): "epsilon epsilon_high center_rewards_coefficient kl_coef",
    (-0.1, 2.0): "top_entropy_quantile",
    (-0.1, 1.1, NAN): "gamma",
    (0.0, -0.2, NAN): "cliprange",
    (0.0, -1e-6, NAN, INF): "value_learning_rate",
}


def test_what_is_out_of_range_or_nan_is_refused_by_name():
    for values, names in OUT_OF_RANGE.items():
        for name, value in product(names.split(), values):
            assert refusal(check_numbers, args(**{name: value})).startswith(f"{name}={value} must be ")
    for name in RANGES.keys() - {"num_train_epochs", "logging_steps", "save_steps", "eval_steps", "top_k"}:
        assert "must be a finite number" in refusal(check_numbers, args(**{name: NAN})), name


def test_what_trl_uses_meaningfully_is_taken():
    for taken in (
        dict(learning_rate=0.0, temperature=0.01, beta=0.0, epsilon=0.0, epsilon_high=None, top_k=0, use_vllm=False),
        dict(max_steps=-1, num_train_epochs=0.5, max_grad_norm=0.0, save_total_limit=None, max_completion_length=None),
        dict(max_grad_norm=INF, epsilon_high=INF, epsilon=0.2, entropy_coef=-0.01, eval_temperature=0.0, min_p=0),
        dict(epsilon=0.2, epsilon_high=0.1, pad_to_multiple_of="auto", learning_rate="1e-5", num_generations=True),
    ):
        check_numbers(args(**taken))


def test_a_setting_that_does_not_count_is_not_looked_at():
    for name, value, other, counts, does_not in (
        ("num_train_epochs", 0, "max_steps", -1, 5),
        ("save_steps", 0, "save_strategy", "steps", "no"),
        ("logging_steps", -1, "logging_strategy", "steps", "epoch"),
        ("eval_steps", -1, "eval_strategy", "steps", "no"),
        ("top_k", -1, "use_vllm", False, True),
    ):
        assert refusal(check_numbers, args(**{name: value, other: counts}))
        check_numbers(args(**{name: value, other: does_not}))


def test_the_sentence_says_the_range_and_what_to_do():
    assert refusal(check_numbers, args(top_p=2.0)) == "top_p=2.0 must be above 0 and at most 1. 1 keeps all tokens."
    assert refusal(check_numbers, args(lam=NAN)) == "lam=nan must be a finite number, at least 0 and at most 1."
    assert refusal(check_numbers, args(gate_above=INF)) == "gate_above=inf must be a finite number."
    assert Range(0, 1).in_words() == "at least 0 and below 1"


def test_words_weights_and_precision_are_looked_at_as_well():
    check_settings(args(scale_rewards="none", reward_weights=[0.0, -1.0]))
    assert refusal(check_settings, args(loss_type="grop")).startswith(
        "loss_type='grop' is unknown. Use one of: grpo, "
    )
    assert "weight 2 is nan" in refusal(check_settings, args(reward_weights=[1.0, NAN]))
    assert "fp16=True has no effect on a CPU" in refusal(check_settings, args(fp16=True))
    check_settings(args(fp16=True, device=SimpleNamespace(type="cuda")))


def test_the_words_are_those_that_trl_compares_with():
    source = ast.parse(Path(find_spec("trl").origin).with_name("trainer").joinpath("grpo_trainer.py").read_text())
    compared = {name: set() for name in CHOICES}
    for node in ast.walk(source):
        if isinstance(node, ast.Compare) and getattr(node.left, "attr", None) in compared:
            words = (word.value for word in ast.walk(node.comparators[0]) if isinstance(word, ast.Constant))
            compared[node.left.attr] |= set(words)
    assert compared == {name: set(choices) for name, choices in CHOICES.items()}


# DeepSpeed files --------------------------------------------------------------------------------------------------


def test_a_deepspeed_file_is_a_json_mapping_of_the_stage_of_the_launch(tmp_path, monkeypatch):
    file = tmp_path / "zero.json"
    for text, words in (('{"a":', "is not valid JSON: Expecting value"), ("[1]", "holds no mapping")):
        file.write_text(text)
        assert f"The DeepSpeed file {file} {words}" in refusal(check_deepspeed_file, str(file))
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    for launched in ("2", None):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", launched or "")
        if launched is None:
            monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        check_deepspeed_file(str(file))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert "has stage 2, but the run was launched with stage 3" in refusal(check_deepspeed_file, str(file))
    for name in (None, {"zero_optimization": {"stage": 2}}, "nowhere.json"):
        check_deepspeed_file(name)
