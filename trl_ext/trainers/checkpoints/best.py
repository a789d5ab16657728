"""`metric_for_best_model`: a name that no evaluation gives is a sentence, where it can be before the first step."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.rewards import RuleSet

_PREFIX = "eval_"
_ROLLOUTS = (
    "loss runtime reward reward_std frac_reward_zero_std entropy kl num_tokens completions/clipped_ratio "
    "completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length "
    "completions/min_terminated_length completions/max_terminated_length".split()
)
# What evaluations give, by kind of trainer.
_GIVEN = {
    "grpo": _ROLLOUTS,
    "ppo": [
        *_ROLLOUTS,
        *(f"objective/{one}" for one in ("scores", "kl", "non_score_reward", "rlhf_reward")),
        *("loss/value_avg", "ppo/explained_variance"),
    ],
    "reward": (
        "loss runtime accuracy margin min_reward mean_reward max_reward num_tokens accuracy_rules_agree "
        "accuracy_rules_disagree rules_agree_frac score_length_correlation".split()
    ),
}


def check_best_metric(trainer: Any) -> None:
    """Raise ConfigError for a name that misspells one that evaluations give.

    Another unknown name may be a metric of the user's own functions, which only an evaluation tells.
    """
    name, rewards = trainer.args.metric_for_best_model, trainer.given_rewards
    own = trainer.compute_metrics is not None or not all(isinstance(reward, RuleSet) for reward in rewards)
    if name is None or own or isinstance(trainer.eval_dataset, dict) or trainer.args.eval_strategy == "no":
        return
    scored = [one for rules in rewards for one in (rules.name, *(rule.name for rule in rules.rules))]
    given = [*_GIVEN[trainer.memory_kind], *(f"rewards/{one}/{what}" for one in scored for what in ("mean", "std"))]
    short = name.removeprefix(_PREFIX).removeprefix("greedy_")  # PPO's eval_greedy
    if short not in given and (close := get_close_matches(short, given, n=1, cutoff=0.8)):
        raise ConfigError(f"metric_for_best_model is {name!r}, which no evaluation gives. Did you mean {close[0]!r}?")


def unknown_metric(name: str, metrics: Iterable[str]) -> ConfigError:
    """Make the error for a name that is none of an evaluation's metrics."""
    there = [one.removeprefix(_PREFIX) for one in metrics]
    close = get_close_matches(name.removeprefix(_PREFIX), there, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"metric_for_best_model is {name!r}, which the evaluation does not give. {guess}It gives: {', '.join(there)}."
    )
