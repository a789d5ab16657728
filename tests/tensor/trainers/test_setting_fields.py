"""The table of ranges knows the fields of the configs, and none of their defaults is out of range."""

import dataclasses
import json
import math
import re
from typing import get_type_hints

import pytest
from trl import GRPOConfig as TRLGRPOConfig
from trl import RewardConfig as TRLRewardConfig

from trl_ext import GRPOConfig, PPOConfig, RewardConfig
from trl_ext.errors import ConfigError
from trl_ext.trainers.settings.values import CHOICES, ONLY_WHERE, RANGES, check_correction, check_settings

ODD = ("yes", "", None, True, 1e39, math.nan, math.inf, -1, -1.0, 1.5, 10**40, [], ["x"], {}, {"x": 1}, b"x")
CONFIGS = (TRLGRPOConfig, TRLRewardConfig, GRPOConfig, PPOConfig, RewardConfig)
OURS = (GRPOConfig, PPOConfig, RewardConfig)


def make(config, folder, **changes):
    return config(str(folder), use_cpu=True, bf16=False, report_to="none", **changes)


def test_every_name_is_a_field():
    fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    assert RANGES.keys() | CHOICES.keys() | {other for other, _ in ONLY_WHERE.values()} <= fields
    assert ONLY_WHERE.keys() <= RANGES.keys()


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_taken(config, tmp_path):
    check_settings(make(config, tmp_path))


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_scale_rewards_may_be_true_as_in_trl(config, tmp_path):
    assert make(config, tmp_path, scale_rewards=True).scale_rewards == "group"


def test_scale_rewards_may_be_false_as_in_trl(tmp_path):
    assert make(GRPOConfig, tmp_path, scale_rewards=False).scale_rewards == "none"


@pytest.mark.parametrize("config", OURS)
def test_a_deepspeed_file_is_looked_at_when_the_config_is_made(config, tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps([2]))
    with pytest.raises(ConfigError, match="holds no mapping"):
        make(config, tmp_path, deepspeed=str(tmp_path / "zero.json"))


# The correction of vLLM's samples -----------------------------------------------------------------------------------

PARTS = [
    dict(top_p=0.9),
    dict(top_k=20),
    dict(min_p=0.1),
    dict(repetition_penalty=1.1),
    dict(vllm_structured_outputs_regex="[0-9]+"),
    dict(generation_kwargs={"top_p": 0.9}),
    dict(generation_kwargs={"presence_penalty": 0.5}),
    dict(generation_kwargs={"logit_bias": {5: 2.0}}),
]


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig, TRLGRPOConfig])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_correcting_samples_of_a_part_of_the_distribution_is_refused_with_both_ways_out(config, part, tmp_path):
    (name, value), *_ = (part.get("generation_kwargs") or part).items()
    both = f"Leave {name} out, or set vllm_importance_sampling_correction=False."
    with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value))} has .* {re.escape(both)}$"):
        check_settings(make(config, tmp_path, use_vllm=True, **part))


def test_the_config_itself_refuses_it_and_ahead_leaves_one_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"Leave top_k out\.$"):
        make(GRPOConfig, tmp_path, use_vllm=True, vllm_mode="server", generation_ahead=1, top_k=20)


def test_samples_of_the_whole_distribution_and_uncorrected_ones_are_taken(tmp_path):
    check_settings(make(GRPOConfig, tmp_path, use_vllm=True, temperature=0.6, top_k=-1, min_p=0.0, top_p=1.0))
    check_settings(make(GRPOConfig, tmp_path, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1))
    check_settings(
        make(GRPOConfig, tmp_path, use_vllm=True, top_p=0.9, top_k=20, vllm_importance_sampling_correction=False)
    )


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        *((dict(clip_max=value), f"clip_max={value} must be ") for value in (-1.0, 0.0, 1e-9, math.nan)),
        *((dict(clip_min=value), f"clip_min={value} must be ") for value in (-0.5, 2.0, math.nan)),
        (dict(mode="token_trunc"), "vllm_importance_sampling_mode='token_trunc' is unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bounds_of_the_correction_that_turn_or_remove_the_gradient_are_refused(bounds, words, tmp_path):
    bounds = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_settings(make(GRPOConfig, tmp_path, use_vllm=True, **bounds))


def test_bounds_that_hold_the_ratio_of_an_unmoved_policy_are_taken(tmp_path):
    for bounds in (dict(clip_max=1.0), dict(clip_max=None), dict(clip_min=0.8, clip_max=1.2), dict(clip_max=math.inf)):
        bounds = {f"vllm_importance_sampling_{name}": value for name, value in bounds.items()}
        check_correction(make(GRPOConfig, tmp_path, use_vllm=True, **bounds))


# Odd values ---------------------------------------------------------------------------------------------------------


def ours(config):
    """The annotations of the settings that a config adds to TRL's."""
    theirs = {field.name for base in (TRLGRPOConfig, TRLRewardConfig) for field in dataclasses.fields(base)}
    # Not the types of fields, which a parser changes.
    hints = get_type_hints(config)
    return {name: str(hints[name]) for name in hints if name in config.__dataclass_fields__ and name not in theirs}


def refused(config, folder, name, value):
    try:
        make(config, folder, **{name: value})
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("config", OURS)
def test_an_odd_value_of_our_settings_is_taken_or_refused_and_raises_nothing_else(config, tmp_path):
    assert len(ours(config)) >= 13
    for name, annotation in ours(config).items():
        answers = {repr(value): refused(config, tmp_path, name, value) for value in ODD}
        is_text, is_number = ("str" in annotation, "int" in annotation or "float" in annotation)
        assert answers["'yes'"] or is_text, name
        assert answers["None"] is ("None" not in annotation), name
        assert answers["True"] or "bool" in annotation or name == "num_sample_generations", name
        assert answers["nan"] and answers["[]"] is ("list" not in annotation), name
        assert answers["1e+39"] and answers[repr(10**40)], name
        assert answers["{}"] or "dict" in annotation, name
        assert answers["-1"] or not is_number or name in ("gate_above", "dataset_num_proc"), name


def test_a_whole_number_may_be_written_as_a_float(tmp_path):
    assert repr(make(PPOConfig, tmp_path, total_episodes=1e2).total_episodes) == "100"
    assert make(GRPOConfig, tmp_path, oversample=2).oversample == 2
