"""A config without a word on precision can be made on a machine without accelerator; a word on it is kept."""

import pytest
import torch

from trl_ext import GRPOConfig, PPOConfig, RewardConfig

CONFIGS = [GRPOConfig, PPOConfig, RewardConfig]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("config", CONFIGS)
def test_without_an_accelerator_the_default_is_float32(config, tmp_path):
    assert config(str(tmp_path)).bf16 is False
    assert not config(str(tmp_path), use_cpu=False).fp16


@pytest.mark.parametrize("config", CONFIGS)
def test_use_cpu_keeps_trls_default(config, tmp_path):
    assert config(str(tmp_path), use_cpu=True).bf16 is True


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("config", CONFIGS)
def test_bf16_that_was_asked_for_is_still_refused_without_an_accelerator(config, tmp_path):
    with pytest.raises(ValueError, match="use_cpu"):
        config(str(tmp_path), bf16=True)
