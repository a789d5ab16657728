"""A setting of earlier TRL or transformers, and a misspelt one, is refused with the name of today."""

import copy
import inspect
import pickle
import re
from dataclasses import dataclass
from importlib import import_module

import pytest

from trl_ext import GRPOConfig, PPOConfig, RewardConfig
from trl_ext.errors import ConfigError
from trl_ext.trainers.settings.former import REPLACED, replacement

CONFIGS = (GRPOConfig, PPOConfig, RewardConfig)
OF_SCRIPTS = {
    name: import_module(f"trl_ext.scripts.{name}").make_parser().types_of.keys() for name in ("grpo", "ppo", "reward")
}


def test_every_former_name_is_unknown_today_and_what_took_its_place_is_there():
    known = set().union(*OF_SCRIPTS.values())
    assert not known & REPLACED.keys()
    for former in REPLACED:
        named = re.findall(r"'(\w+)'", replacement(former))
        assert set(named) <= known, former
        assert named or "leave it out" in replacement(former).lower() or "--vllm_servers" in replacement(former)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("former", REPLACED)
def test_a_config_names_what_took_the_place(config, former):
    with pytest.raises(TypeError) as caught:
        config("out", **{former: 1})
    assert str(caught.value) == f"{config.__name__} has no argument '{former}'. {replacement(former)}"
    assert isinstance(caught.value, ConfigError)


def test_the_sentence_of_the_commonest_one():
    with pytest.raises(TypeError, match=r"has no argument 'max_prompt_length'\. Prompts are not cut: leave out rows"):
        GRPOConfig("out", max_prompt_length=512)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_misspelt_argument_has_its_nearest(config):
    with pytest.raises(TypeError, match=r"has no argument 'learnig_rate'\. Did you mean 'learning_rate'\?"):
        config("out", learnig_rate=1e-6)
    with pytest.raises(TypeError, match=r"has no argument 'qqq'\.$"):
        config("out", qqq=1)


@dataclass
class WithField(GRPOConfig):
    warmup_ratio: float = 0.5


class WithConstructor(GRPOConfig):
    def __init__(self, own, **settings):
        super().__init__(**settings)
        self.own = own


def test_configs_of_users_keep_arguments_of_their_own():
    settings = dict(output_dir="out", use_cpu=True, bf16=False)
    assert WithField(**settings, warmup_ratio=0.1).warmup_ratio == 0.1
    made = WithConstructor(own=3, **settings)
    assert made.own == 3 and copy.deepcopy(made).own == pickle.loads(pickle.dumps(made)).own == 3
    assert "learning_rate" in inspect.signature(GRPOConfig).parameters
