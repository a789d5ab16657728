"""Inherited settings of PPOConfig without effect in PPO: any value but the default is refused with its reason.

`tests/train/trainers/ppo/test_ppo_every_field.py` checks that each field changes the training, is refused here, or is
on a list of fields that do not change the numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import eq
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import Row
from trl_ext.trainers.ppo.objective.equations import OF_GROUPS, PER_TOKEN
from trl_ext.trainers.settings.values import is_given

_GROUPS = "the critic takes the place of GRPO's groups, and advantages are whitened over the whole update"
_ONE_SCORE = (
    "the critic predicts one score per completion, the weighted sum of all rewards. Weigh them by reward_weights"
)
_KL_IN_LOSS = "it belongs to a KL term in the loss, and PPO's KL is part of the reward (kl_coef, kl_estimator)"
_REFERENCE = (
    "PPO measures its KL against one fixed reference. To let the policy go further from it, lower kl_coef or set "
    "kl_target"
)
_ORDER = "GRPO's sampler, which deals whole groups, decides the order of the rows. Use seed and shuffle_dataset"
_PREDICTIONS = "an evaluation generates and scores completions, and collects no labels and no predictions"

REASONS = {
    "scale_rewards": f"{_GROUPS} (whiten_rewards scales rewards, too)",
    "oversample": f"{_GROUPS}, so that no group is without variance",
    "curriculum": "a pass rate takes a group of completions, and PPO samples one for a prompt as a rule",
    "multi_objective_aggregation": _ONE_SCORE,
    "use_bias_correction_kl": _KL_IN_LOSS,
    "sync_ref_model": _REFERENCE,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "train_sampling_strategy": _ORDER,
    "length_column_name": _ORDER,
    "data_seed": _ORDER,
    "label_smoothing_factor": "there are no labels in PPO's losses",
    "label_names": _PREDICTIONS,
    "batch_eval_metrics": _PREDICTIONS,
    "include_for_metrics": _PREDICTIONS,
    "average_tokens_across_devices": "the losses are means over the tokens of all processes in any case",
    "num_sample_generations": "nothing is sampled for show. Set log_completions=True",
}
# Values that describe PPO's behaviour, and so are not refused: no samples are shown, TRL's old spelling of "group",
# scores of reward models stay unchanged if there is no reward model.
_TRUE_ANYWAY = {
    "num_sample_generations": (0,),
    "scale_rewards": (True,),
    "score_normalisation": ("none",),
    "score_clip": (None,),
    "cliprange": (0.2,),  # what a copied config has
}
_OF_THE_CRITIC = (
    "lam vf_coef cliprange_value value_learning_rate value_lr_scheduler_type value_normalisation critic_init "
    "critic_warmup_steps".split()
)
_OF_ONE_LOSS = {
    "sapo": ("temperature_pos", "temperature_neg"),
    "vespo": ("k_pos", "k_neg", "lambda_pos", "lambda_neg"),
}
_CLIPS = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")
_A_CLIP = f"a loss that clips the ratio on both sides (loss_type {', '.join(_CLIPS)})"
# Settings that only another one brings to work: its name, and whether its value does.
_NEEDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "kl_horizon": ("kl_target", lambda value: value is not None, "kl_target=..., which it steers to"),
    **{
        name: ("advantage_estimator", lambda value: value == "gae", "a critic (advantage_estimator='gae')")
        for name in _OF_THE_CRITIC
    },
    **{
        name: ("advantage_estimator", PER_TOKEN.__contains__, "advantages per token: gae or reinforce_pp")
        for name in ("gamma", "whiten_rewards")
    },
    **{name: ("loss_type", _CLIPS.__contains__, _A_CLIP) for name in ("epsilon", "cliprange", "delta")},
    "epsilon_high": ("loss_type", (*_CLIPS, "cispo").__contains__, f"{_A_CLIP}, or cispo"),
    **{
        f"{loss}_{name}": ("loss_type", partial(eq, loss), f"loss_type='{loss}'")
        for loss, names in _OF_ONE_LOSS.items()
        for name in names
    },
    "skip_zero_advantage": (
        "advantage_estimator",
        lambda value: value != "gae",
        "an advantage_estimator that has no critic, since a critic learns from every row",
    ),
    "gate_above": ("score_mode", lambda value: value == "gate", "score_mode='gate'"),
}
_OF_THE_KL = ("kl_estimator", "kl_term", "kl_target", "ref_adapter_name")
# Settings of reward models.
_OF_REWARD_MODELS = ("score_normalisation", "score_clip", "reward_tokens_per_forward")


# Policy losses and the advantages that they allow:
#   one ratio per token         the clip with its variants, cispo, sapo: any advantages
#   one detached weight         vespo: any advantages, since each token keeps its gradient
#   one ratio per completion    gspo, luspo: one advantage per completion. The gradient of ratio * A_t, summed over
#                               tokens, is the gradient of ratio * sum of A_t: advantages would be spread evenly.
# fmt: off
OF_PPO: tuple[Row, ...] = (
    (lambda critic, advantage_estimator: critic is not None and (critic == "none") != (advantage_estimator != "gae"),
     "gae needs a critic, and no other estimator has a critic. Leave critic out."),
    (lambda advantage_estimator, num_generations: advantage_estimator in OF_GROUPS and num_generations == 1,
     "the estimator compares the completions of a prompt. Give 2 or more, or take reinforce_pp."),
    (lambda kl_estimator, kl_term: kl_estimator == "k1" and kl_term == "loss",
     "k1 has no gradient as a loss: its mean over the policy's own samples is 0. Take kl_estimator='k2', whose "
     "gradient is the KL's, or kl_term='reward'."),
    (lambda stop_token, stop_token_id: stop_token is not None and stop_token_id is not None, "give one of the two."),
    (lambda importance_sampling_level, loss_type: importance_sampling_level == "sequence" and loss_type == "vespo",
     "vespo's weight is that of the whole completion in any case. Leave importance_sampling_level out."),
    (lambda importance_sampling_level, advantage_estimator:
        importance_sampling_level == "sequence" and advantage_estimator not in OF_GROUPS,
     "there is one ratio a completion and one advantage a token, whose mean the gradient would spread evenly over the "
     "completion. Take rloo or grpo, or importance_sampling_level='token'."),
    (lambda loss_type, importance_sampling_level: loss_type == "luspo" and importance_sampling_level != "sequence",
     "luspo is a loss of whole completions (arXiv:2602.05261). Set importance_sampling_level='sequence', with "
     "advantage_estimator rloo or grpo."),
    (lambda loss_type, epsilon_high, epsilon:
        loss_type == "cispo" and (epsilon if epsilon_high is None else epsilon_high) < 1,
     "cispo bounds the ratio by epsilon_high itself, not by 1 + epsilon_high, and would cut every one. Give 1 or "
     "more, such as epsilon_high=5.0."),
    (lambda delta, epsilon_high, epsilon:
        delta is not None and delta <= 1 + (epsilon if epsilon_high is None else epsilon_high),
     "delta must be above 1 + epsilon_high, or it cuts what the clip leaves, with positive advantages, too. Give "
     "more, such as 3.0."),
)
# fmt: on


def refuse_without_effect(config: Any) -> None:
    """Raise ConfigError for a setting given by the user that has no effect in PPO."""
    for name, value in _news(config, REASONS):
        raise ConfigError(f"{name}={value!r} has no effect in PPO: {REASONS[name]}. Leave {name} out.")
    for name, value in _news(config, _NEEDS):
        other, brings, what = _NEEDS[name]
        if not brings(getattr(config, other)):
            raise ConfigError(f"{name}={value!r} has no effect without {what}. Set both, or leave {name} out.")


def refuse_without_kl(config: Any) -> None:
    """Raise ConfigError for a setting of the KL with kl_coef=0; called after the old names were applied."""
    for name, value in _news(config, _OF_THE_KL if config.beta == 0 else ()):
        raise ConfigError(
            f"{name}={value!r} has no effect with kl_coef=0, which measures no KL. Leave {name} out, or set kl_coef."
        )


def refuse_without_reward_models(config: Any) -> None:
    """Raise ConfigError for a setting of reward models if no reward model is used."""
    for name, value in _news(config, _OF_REWARD_MODELS):
        raise ConfigError(
            f"{name}={value!r} has no effect without a reward model: it is about reward models' scores. Give a "
            f"reward_model, or leave {name} out (a RuleSet has the fields clip and normalise)."
        )


def _news(config: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of settings that the user gave, except values in _TRUE_ANYWAY."""
    for name in names:
        if is_given(config, name) and (value := getattr(config, name)) not in _TRUE_ANYWAY.get(name, ()):
            yield name, value
