"""What a policy loss of TRL's means beside PPO's advantages per token, and which settings mean nothing.

one ratio a token         the clip with its variants, cispo, sapo: any advantages
one detached weight       vespo: any advantages, since each token keeps its own gradient
one ratio a completion    gspo, luspo: one advantage a completion. The gradient of ratio * A_t, summed over tokens, is
                          that of the ratio times the sum of A_t: what single tokens earned would be spread evenly.
"""

from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo.advantages import OF_GROUPS

_LEAST_WEIGHT = 1.0  # below it, cispo's bound cuts the ratio of a policy that has not moved


def check_policy_loss(config: Any) -> None:
    """Raise ConfigError for a policy loss that means nothing, or not what it says, with these settings.

    Args:
        config: PPOConfig whose old names have been taken.
    """
    by_sequence, loss = config.importance_sampling_level == "sequence", config.loss_type
    estimator = config.advantage_estimator
    if by_sequence and loss == "vespo":
        raise ConfigError(
            "importance_sampling_level='sequence' has no effect with loss_type='vespo', whose weight is that of the "
            "whole completion in any case. Leave it out."
        )
    if by_sequence and estimator not in OF_GROUPS:
        raise ConfigError(
            "importance_sampling_level='sequence' has one ratio a completion, and "
            f"advantage_estimator='{estimator}' one advantage a token, whose mean the gradient would spread evenly "
            "over the completion. Take rloo or grpo, or importance_sampling_level='token'."
        )
    if loss == "luspo" and not by_sequence:
        raise ConfigError(
            "loss_type='luspo' is a loss of whole completions (arXiv:2602.05261). Set "
            "importance_sampling_level='sequence', with advantage_estimator rloo or grpo."
        )
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if loss == "cispo" and high < _LEAST_WEIGHT:
        raise ConfigError(
            "loss_type='cispo' bounds the ratio by epsilon_high itself, not by 1 + epsilon_high, and "
            f"{high} would cut every one. Give 1 or more, such as epsilon_high=5.0."
        )
    if config.delta is not None and config.delta <= 1 + high:
        raise ConfigError(
            f"delta={config.delta} is not above 1 + epsilon_high = {1 + high:g}: it would cut what the clip leaves, "
            "with positive advantages, too. Give more, such as 3.0."
        )
