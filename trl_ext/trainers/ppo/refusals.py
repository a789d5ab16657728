"""Rows of PPO's refusals: settings without effect, and settings that contradict each other.

`tests/train/trainers/ppo/test_ppo_every_field.py` checks that each field changes the training, is refused here, or is
on a list of fields that do not change the numbers.
"""

from collections.abc import Callable

from trl_ext.memory.contradictions import Row
from trl_ext.trainers.ppo.objective.equations import OF_GROUPS, PER_TOKEN
from trl_ext.trainers.settings.values import Idle

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
_OF_THE_CRITIC = (
    "lam vf_coef cliprange_value value_learning_rate value_lr_scheduler_type value_normalisation critic_init "
    "critic_warmup_steps".split()
)
_CLIPS = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")
_A_CLIP = f"a loss that clips the ratio on both sides (loss_type {', '.join(_CLIPS)})"

# Values that describe PPO's behaviour are not refused: no samples are shown, TRL's old spelling of "group".
_ARE_REFUSED: dict[str, Callable[..., bool]] = {
    "num_sample_generations": lambda num_sample_generations: num_sample_generations != 0,
    "scale_rewards": lambda scale_rewards: scale_rewards not in (True,),
}


def _needs(what: str, is_idle: Callable[..., bool], *names: str) -> tuple[Idle, ...]:
    """Return the rows of settings that need others, `what` in words."""
    return tuple((name, is_idle, f"without {what}. Set both, or leave {name} out.") for name in names)


# fmt: off
WITHOUT_EFFECT: tuple[Idle, ...] = (
    *((name, _ARE_REFUSED.get(name, lambda: True), f"in PPO: {why}. Leave {name} out.")
      for name, why in REASONS.items()),
    *_needs("kl_target=..., which it steers to", lambda kl_target: kl_target is None, "kl_horizon"),
    *_needs("a critic (advantage_estimator='gae')",
            lambda advantage_estimator: advantage_estimator != "gae", *_OF_THE_CRITIC),
    *_needs("advantages per token: gae or reinforce_pp",
            lambda advantage_estimator: advantage_estimator not in PER_TOKEN, "gamma", "whiten_rewards"),
    *_needs(_A_CLIP, lambda loss_type: loss_type not in _CLIPS, "epsilon"),
    # A copied config has 0.2.
    *_needs(_A_CLIP, lambda loss_type, cliprange: loss_type not in _CLIPS and cliprange != 0.2, "cliprange"),
    *_needs(_A_CLIP, lambda loss_type: loss_type not in _CLIPS, "delta"),
    *_needs(f"{_A_CLIP}, or cispo", lambda loss_type: loss_type not in (*_CLIPS, "cispo"), "epsilon_high"),
    *_needs("loss_type='sapo'",
            lambda loss_type: loss_type != "sapo", "sapo_temperature_pos", "sapo_temperature_neg"),
    *_needs("loss_type='vespo'",
            lambda loss_type: loss_type != "vespo",
            "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    *_needs("an advantage_estimator that has no critic, since a critic learns from every row",
            lambda advantage_estimator: advantage_estimator == "gae", "skip_zero_advantage"),
    *_needs("score_mode='gate'", lambda score_mode: score_mode != "gate", "gate_above"),
)
# For a config whose old names have been replaced.
WITHOUT_KL: tuple[Idle, ...] = tuple(
    (name, lambda beta: beta == 0,
     f"with kl_coef=0, which measures no KL. Leave {name} out, or set kl_coef.")
    for name in ("kl_estimator", "kl_term", "kl_target", "ref_adapter_name")
)
# For a trainer without a reward model. Scores that stay as they are describe it anyway.
_SCORES_OF_MODELS = (
    "without a reward model: it is about reward models' scores. Give a reward_model, or leave {name} out (a RuleSet "
    "has the fields clip and normalise)."
)
WITHOUT_REWARD_MODELS: tuple[Idle, ...] = (
    ("score_normalisation", lambda score_normalisation: score_normalisation != "none",
     _SCORES_OF_MODELS.format(name="score_normalisation")),
    ("score_clip", lambda score_clip: score_clip is not None, _SCORES_OF_MODELS.format(name="score_clip")),
    ("reward_tokens_per_forward", lambda: True, _SCORES_OF_MODELS.format(name="reward_tokens_per_forward")),
)
# fmt: on


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
