"""Arguments of `trl_ext.PPOTrainer`: GRPOConfig's, PPO's, and TRL 1.12's names."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from trl_ext.compat.trl import without_groups
from trl_ext.errors import ConfigError, refuse_first
from trl_ext.memory.contradictions import Row, check
from trl_ext.trainers.grpo.config import GRPOConfig
from trl_ext.trainers.ppo.critic.schedule import check_warmup
from trl_ext.trainers.ppo.objective.equations import ADVANTAGES, ESTIMATORS
from trl_ext.trainers.ppo.refusals import OF_PPO, WITHOUT_EFFECT, WITHOUT_KL
from trl_ext.trainers.ppo.scores.combine import KINDS, MODES
from trl_ext.trainers.settings.values import check_effects, check_numbers, check_types, setting

CRITICS = ("adapter", "head", "separate", "none")

# TRL 1.12's names, with the names here.
RENAMED = {
    "response_length": "max_completion_length",
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "kl_coef": "beta",
}


def _rename(name: str) -> Any:
    return setting(None, f"TRL 1.12's name of `{RENAMED[name]}`.")


@dataclass(repr=False)
class PPOConfig(GRPOConfig):
    """PPO on GRPO's engine, with the arguments of TRL 1.12's `PPOConfig` under their old names.

    One update: `per_device_train_batch_size` x processes x `gradient_accumulation_steps` x `num_mini_batches` episodes
    are sampled; each of `num_ppo_epochs` passes over them takes `num_mini_batches` optimizer steps.
    """

    # Defaults that differ from GRPO's: TRL 1.12's for PPO.
    learning_rate: float = setting(3e-6, "Initial learning rate of the actor.")
    num_generations: int | None = setting(1, "Completions per prompt. A critic needs no group, so 1 is usual.")
    max_completion_length: int | None = setting(53, "Most tokens of a completion.")
    num_iterations: int = setting(4, "PPO epochs: passes over the episodes of an update.")
    temperature: float = setting(0.7, "Sampling temperature.")
    beta: float = setting(0.05, "Weight of the KL penalty in the reward; 0 needs no reference model.")
    disable_dropout: bool = setting(True, "No dropout in any model: with it, the ratio of new to old policy is noise.")
    epsilon: float = setting(0.2, "Clip range of the policy's probability ratio.")

    response_length: int | None = _rename("response_length")
    num_ppo_epochs: int | None = _rename("num_ppo_epochs")
    cliprange: float | None = _rename("cliprange")
    kl_coef: float | None = _rename("kl_coef")

    num_mini_batches: int = setting(1, "Optimizer steps in one PPO epoch. Each has its own episodes.")
    total_episodes: int | None = setting(
        None, "Episodes to sample in all, rounded up to whole updates. Sets max_steps; unset: num_train_epochs."
    )
    local_rollout_forward_batch_size: int | None = setting(
        None,
        "In evaluation, rows in one forward. Unset: per_device_eval_batch_size. Training makes its passes by the "
        "update's forwards: see max_tokens_per_forward.",
    )
    stop_token: str | None = setting(
        None, "'eos': only the tokenizer's EOS token ends a completion. Unset: every EOS token of the model does."
    )
    stop_token_id: int | None = setting(None, "The one token that ends a completion.")
    missing_eos_penalty: float | None = setting(None, "Subtracted from the score of a completion that was cut off.")
    kl_estimator: str = setting(
        "k1",
        "Estimator of the KL. In the reward, k1, the log-ratio, has the KL's gradient; k2 and k3 hardly restrain the "
        "policy there. In the loss, k2 has the KL's gradient, and k3 the gradient of KL(reference || policy).",
    )
    kl_term: str = setting(
        "reward",
        "Where the KL is added. reward: at every token, as in PPO and RLOO. loss: to the policy loss, as in GRPO, as "
        "a mean over the tokens of the step for any loss_type; needs kl_estimator k2 or k3.",
    )
    kl_target: float | None = setting(
        None, "Target KL of a completion, in nats, to which the KL coefficient adapts. Unset: it is fixed."
    )
    kl_horizon: float = setting(10_000, "Episodes over which the KL coefficient follows kl_target.")
    advantage_estimator: str = setting(
        "gae",
        "gae: PPO's, with a critic. Without a critic: reinforce_pp (REINFORCE++: rewards to come, whitened over the "
        "update), rloo and grpo (against the prompt's other completions; num_generations of 2 or more), remax "
        "(against the prompt's greedy completion).",
    )
    gamma: float = setting(1.0, "Discount per token.")
    lam: float = setting(0.95, "Decay of the generalized advantage estimate.")
    whiten_rewards: bool = setting(False, "Scale the rewards per token, KL penalty included, to variance 1.")
    vf_coef: float = setting(0.1, "Weight of the value loss.")
    cliprange_value: float | None = setting(
        0.2, "Largest distance of a value from its old value before it is clipped. null: no clipping."
    )
    value_normalisation: bool = setting(
        True,
        "The critic predicts on the running scale of the returns, so that large scores make no large value loss; "
        "cliprange_value is on that scale, too. False: in the units of the scores, as in TRL 1.12.",
    )
    critic: str | None = setting(
        None,
        "adapter: a second LoRA on the actor's frozen backbone. head: a value head on the actor's hidden states. "
        "separate: value_model, with its own optimizer. Unset: separate with a value_model, else adapter with PEFT, "
        "else head; none if advantage_estimator is not gae.",
    )
    value_learning_rate: float | None = setting(None, "Initial learning rate of the critic. Unset: learning_rate.")
    value_lr_scheduler_type: str | None = setting(
        None, "Schedule of the critic's learning rate. Unset: lr_scheduler_type."
    )
    critic_init: str | None = setting(
        None,
        "reward: the critic starts from the (first) reward model: adapter from reward_adapter's LoRA and score, head "
        "from reward_model's score, separate from a copy of reward_model. Unset: adapter and head start at zero, "
        "separate from value_model.",
    )
    critic_warmup_steps: int = setting(
        0, "First optimizer steps in which only the critic learns; the actor and its Adam state do not change."
    )
    score_mode: str = setting(
        "add",
        "add: weighted sum of rules and reward models. gate: reward models only score completions that pass the "
        "rules.",
    )
    gate_above: float = setting(0.0, "With score_mode='gate': the sum of rules that a completion must exceed to pass.")
    score_normalisation: str = setting(
        "running",
        "Normalisation of a reward model's scores. running: by the moments of all scores so far. none: unchanged. "
        "Rules are never normalised here.",
    )
    score_clip: float | None = setting(
        10.0, "Largest absolute value of a reward model's normalised score. null: no limit."
    )
    reward_tokens_per_forward: int | None = setting(
        None, "Most tokens in one forward of a reward model. Unset: 16,384."
    )
    ref_adapter_name: str | None = setting(
        None, "The model's adapter that is the reference. Unset: the model without adapter."
    )
    model_adapter_name: str | None = setting(None, "The model's adapter that is trained. Unset: the active adapter.")
    num_sample_generations: int = setting(10, "TRL 1.12's; no effect. To see completions use log_completions.")
    sft_model_path: str = setting("EleutherAI/pythia-160m", "For scripts: path of the policy.")
    reward_model_path: str = setting("EleutherAI/pythia-160m", "For scripts: path of the reward model.")
    dataset_num_proc: int | None = setting(None, "For scripts: processes that tokenize.")

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "advantage_estimator": ADVANTAGES,
        "critic": CRITICS,
        "critic_init": ("reward",),
        "kl_estimator": ESTIMATORS,
        "kl_term": ("reward", "loss"),
        "score_mode": MODES,
        "score_normalisation": KINDS,
        "stop_token": ("eos",),
    }
    contradictions: ClassVar[tuple[Row, ...]] = (*GRPOConfig.contradictions, *OF_PPO)

    def __post_init__(self) -> None:
        check_types(self)
        check_effects(self, WITHOUT_EFFECT)
        check_numbers(self)  # before old names are replaced, so that the message has the name that was given
        self._take_old_names()
        self._set_steps_per_generation()
        with without_groups(self):
            super().__post_init__()
        for old, new in RENAMED.items():
            setattr(self, old, getattr(self, new))
        self._check_batch()
        check(self, OF_PPO)
        check_effects(self, WITHOUT_KL)
        if self.num_total_batches is not None:
            steps = self.num_total_batches * self.num_iterations * self.num_mini_batches
            if self.max_steps > 0 and self.max_steps != steps:  # equal in a copy of this config
                raise ConfigError(
                    f"max_steps={self.max_steps} has no effect with total_episodes={self.total_episodes}, which "
                    f"makes {steps} optimizer steps. Give total_episodes alone, or unset it (total_episodes: null)."
                )
            self.max_steps = steps
        check_warmup(self.critic_warmup_steps, self.max_steps)

    # TRL 1.12 wrote these into the config; scripts read them.

    @property
    def batch_size(self) -> int:
        """Episodes of an update, over all processes."""
        return cast(int, self.generation_batch_size)  # None until __post_init__

    @property
    def num_total_batches(self) -> int | None:
        """Updates of the run; None without `total_episodes`."""
        return None if self.total_episodes is None else math.ceil(self.total_episodes / self.batch_size)

    def _take_old_names(self) -> None:
        fields = type(self).__dataclass_fields__
        for old, new in RENAMED.items():
            given, current = getattr(self, old), getattr(self, new)
            if given is None or given == current:
                continue
            if current != fields[new].default:
                raise ConfigError(f"{old}={given} and {new}={current} name the same setting. Give one of them.")
            setattr(self, new, given)

    def _set_steps_per_generation(self) -> None:
        wanted = self.gradient_accumulation_steps * self.num_mini_batches
        if self.generation_batch_size is None and self.steps_per_generation is None:
            self.steps_per_generation = wanted
        elif self.steps_per_generation not in (None, wanted) or self.num_mini_batches != 1:
            raise ConfigError(
                f"num_mini_batches={self.num_mini_batches} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} already fix how many episodes an update has. Leave "
                "steps_per_generation and generation_batch_size unset."
            )

    def _check_batch(self) -> None:
        size = cast(int, self.num_generations)
        eval_batch = self.per_device_eval_batch_size * self.world_size
        refuse_first(
            {
                f"The {self.batch_size} episodes of an update cannot be split into groups of num_generations={size}. "
                "Change per_device_train_batch_size or gradient_accumulation_steps.": self.batch_size % size,
                f"An evaluation batch of {eval_batch} rows cannot be split into groups of num_generations={size}. "
                "Change per_device_eval_batch_size, or set num_generations_eval=1.": (
                    self.eval_strategy != "no" and eval_batch % (self.num_generations_eval or size)
                ),
                f"kl_horizon={self.kl_horizon} is not above the {self.batch_size} episodes of an update, and the KL "
                "coefficient would jump. Use 10 times the episodes or more.": (
                    self.kl_target is not None and self.kl_horizon <= self.batch_size
                ),
            }
        )
