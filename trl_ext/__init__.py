"""trl_ext: rules as rewards, packing with shared prompts, and settings that fit the card, for Hugging Face TRL.

Names load on first use: `import trl_ext` imports neither torch nor TRL.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trl_ext.resources import __version__

_HOME = {
    "AsyncGRPOTrainer": "trl_ext.trainers.async_grpo.trainer",
    "GRPOConfig": "trl_ext.trainers.grpo.config",
    "GRPOTrainer": "trl_ext.trainers.grpo.trainer",
    "PPOConfig": "trl_ext.trainers.ppo.config",
    "PPOTrainer": "trl_ext.trainers.ppo.trainer",
    "RewardConfig": "trl_ext.trainers.reward.config",
    "RewardTrainer": "trl_ext.trainers.reward.trainer",
    "Rule": "trl_ext.rewards",
    "RuleSet": "trl_ext.rewards",
    "Verdict": "trl_ext.rewards",
    "filter_pairs": "trl_ext.rewards",
    "plan": "trl_ext.memory",
}

__all__ = [
    "AsyncGRPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "Rule",
    "RuleSet",
    "Verdict",
    "__version__",
    "filter_pairs",
    "plan",
]

if TYPE_CHECKING:
    from trl_ext.memory import plan
    from trl_ext.rewards import Rule, RuleSet, Verdict, filter_pairs
    from trl_ext.trainers.async_grpo.trainer import AsyncGRPOTrainer
    from trl_ext.trainers.grpo.config import GRPOConfig
    from trl_ext.trainers.grpo.trainer import GRPOTrainer
    from trl_ext.trainers.ppo.config import PPOConfig
    from trl_ext.trainers.ppo.trainer import PPOTrainer
    from trl_ext.trainers.reward.config import RewardConfig
    from trl_ext.trainers.reward.trainer import RewardTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        sentence = f"module 'trl_ext' has no attribute '{name}'. It offers {', '.join(sorted(_HOME))}."
        # For `from trl_ext import name` Python drops the message of an AttributeError.
        is_import = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        if not is_import or find_spec(f"trl_ext.{name}"):
            raise AttributeError(sentence)
        is_trls = find_spec("trl") and name in dir(import_module("trl"))
        raise ImportError(f"'{name}' is TRL's and the same here: from trl import {name}." if is_trls else sentence)
    try:
        return getattr(import_module(_HOME[name]), name)
    except (ImportError, AttributeError):
        from trl_ext.compat.versions import check_versions

        check_versions()  # names what a package lacks
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
