"""The table of ranges knows the fields of the configs, and none of their defaults is out of range."""

import dataclasses
import json

import pytest
from trl import GRPOConfig as TRLGRPOConfig
from trl import RewardConfig as TRLRewardConfig

from trl_ext import GRPOConfig, PPOConfig, RewardConfig
from trl_ext.errors import ConfigError
from trl_ext.trainers.setting_checks import CHOICES, ONLY_WHERE, RANGES, check_settings

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


@pytest.mark.parametrize("config", OURS)
def test_a_batch_of_none_is_a_sentence_when_the_config_is_made(config, tmp_path):
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
            make(config, tmp_path, **{name: 0})


def test_a_group_of_none_is_a_sentence_where_trl_divides_by_it(tmp_path):
    with pytest.raises(ConfigError, match="num_generations=0 must be at least 1"):
        make(GRPOConfig, tmp_path, num_generations=0)


@pytest.mark.parametrize("config", OURS)
def test_a_deepspeed_file_is_looked_at_when_the_config_is_made(config, tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps([2]))
    with pytest.raises(ConfigError, match="holds no mapping"):
        make(config, tmp_path, deepspeed=str(tmp_path / "zero.json"))
