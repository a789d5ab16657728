"""Arguments of `trl_ext.PPOTrainer`: those of GRPOConfig, whose engine it runs on, PPO's own, and TRL 1.12's names."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

from trl_ext.compat.trl import without_groups
from trl_ext.errors import ConfigError
from trl_ext.trainers.grpo.config import GRPOConfig
from trl_ext.trainers.ppo.equations import ESTIMATORS
from trl_ext.trainers.ppo.scores.combine import KINDS, MODES
from trl_ext.trainers.ppo.without_effect import check_settings
from trl_ext.trainers.setting_checks import check_numbers

CRITICS = ("adapter", "head", "separate")

# TRL 1.12's name: the name of the same thing here.
RENAMED = {
    "response_length": "max_completion_length",
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "kl_coef": "beta",
}


def _renamed(name: str) -> Any:
    return field(default=None, metadata={"help": f"TRL 1.12's name of `{RENAMED[name]}`."})


@dataclass
class PPOConfig(GRPOConfig):
    """PPO on GRPO's engine, with the arguments of TRL 1.12's `PPOConfig` under their old names.

    One update: `per_device_train_batch_size` x processes x `gradient_accumulation_steps` x `num_mini_batches` episodes
    are sampled; each of `num_ppo_epochs` passes over them takes `num_mini_batches` optimizer steps.
    """

    # Other defaults than GRPO's: TRL 1.12's of PPO.
    learning_rate: float = field(default=3e-6, metadata={"help": "Initial learning rate of the actor."})
    num_generations: int | None = field(
        default=1, metadata={"help": "Completions per prompt. A critic needs no group, so 1 is usual."}
    )
    max_completion_length: int | None = field(default=53, metadata={"help": "Most tokens of a completion."})
    num_iterations: int = field(default=4, metadata={"help": "PPO epochs: passes over the episodes of an update."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    beta: float = field(
        default=0.05, metadata={"help": "Weight of the KL penalty in the reward; 0 needs no reference model."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "No dropout in any model: with it, the ratio of new to old policy is noise."}
    )
    epsilon: float = field(default=0.2, metadata={"help": "Clip range of the policy's probability ratio."})

    response_length: int | None = _renamed("response_length")
    num_ppo_epochs: int | None = _renamed("num_ppo_epochs")
    cliprange: float | None = _renamed("cliprange")
    kl_coef: float | None = _renamed("kl_coef")

    num_mini_batches: int = field(
        default=1, metadata={"help": "Optimizer steps in one PPO epoch. Each has its own episodes."}
    )
    total_episodes: int | None = field(
        default=None,
        metadata={
            "help": "Episodes to sample in all, rounded up to whole updates. Sets max_steps; unset: num_train_epochs."
        },
    )
    local_rollout_forward_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows in one forward without gradient. Unset: per_device_train_batch_size. See also "
            "max_tokens_per_forward."
        },
    )
    stop_token: str | None = field(
        default=None,
        metadata={
            "help": "'eos': only the tokenizer's EOS token ends a completion. Unset: every EOS "
            "token of the model does."
        },
    )
    stop_token_id: int | None = field(default=None, metadata={"help": "The one token that ends a completion."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion that was cut off."}
    )
    kl_estimator: str = field(
        default="k1",
        metadata={
            "help": "Of the KL in the reward. k1: the log-ratio; its gradient is the KL's. k3: never negative, but in "
            "the reward it hardly holds the policy back: its gradient is another one and vanishes near the reference."
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={"help": "KL of a completion, in nats, that the KL coefficient is steered to. Unset: it is fixed."},
    )
    kl_horizon: float = field(
        default=10_000, metadata={"help": "Episodes over which the KL coefficient follows kl_target."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per token."})
    lam: float = field(default=0.95, metadata={"help": "Decay of the generalized advantage estimate."})
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Scale the rewards per token, KL penalty included, to variance 1."}
    )
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float | None = field(
        default=0.2, metadata={"help": "How far a value may move from its old one before it is clipped. Unset: never."}
    )
    critic: str | None = field(
        default=None,
        metadata={
            "help": "adapter: one frozen backbone, a LoRA for the actor and one for the critic. head: a value head on "
            "the actor's hidden states. separate: value_model, with an optimizer of its own. Unset: separate with a "
            "value_model, else adapter with PEFT, else head."
        },
    )
    value_learning_rate: float | None = field(
        default=None, metadata={"help": "Initial learning rate of the critic. Unset: learning_rate."}
    )
    score_mode: str = field(
        default="add",
        metadata={
            "help": "add: weighted sum of rules and reward models. gate: reward models only judge what passes the "
            "rules. rules_only: reward models are not asked."
        },
    )
    gate_above: float = field(
        default=0.0, metadata={"help": "With score_mode='gate': what the rules' sum must exceed to pass."}
    )
    score_normalisation: str = field(
        default="none",
        metadata={
            "help": "Of a reward model's scores. running: by all seen so far. fixed: by score_mean and score_std."
        },
    )
    score_mean: float | None = field(default=None, metadata={"help": "For score_normalisation='fixed'."})
    score_std: float | None = field(default=None, metadata={"help": "For score_normalisation='fixed'."})
    score_clip: float | None = field(
        default=None, metadata={"help": "Largest absolute value of a reward model's normalised score."}
    )
    reward_tokens_per_forward: int | None = field(
        default=None, metadata={"help": "Most tokens in one forward of a reward model. Unset: 16,384."}
    )
    ref_adapter_name: str | None = field(
        default=None,
        metadata={"help": "Adapter of the model that is the reference. Unset: the model without adapter."},
    )
    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Adapter of the model that is trained. Unset: the active one."}
    )
    num_sample_generations: int = field(
        default=10,
        metadata={"help": "TRL 1.12's. Nothing is sampled for show: see log_completions and generate_completions()."},
    )
    sft_model_path: str = field(
        default="EleutherAI/pythia-160m", metadata={"help": "For scripts: path of the policy."}
    )
    reward_model_path: str = field(
        default="EleutherAI/pythia-160m", metadata={"help": "For scripts: path of the reward model."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "For scripts: processes that tokenize."})

    def __post_init__(self) -> None:
        check_settings(self)
        check_numbers(self)  # before the old names are taken: the message has the name that was given
        self._take_old_names()
        self._set_steps_per_generation()
        with without_groups(self):
            super().__post_init__()
        for old, new in RENAMED.items():
            setattr(self, old, getattr(self, new))
        self._check_groups()
        self._check_choices()
        self._check_horizon()
        if self.num_total_batches is not None:
            steps = self.num_total_batches * self.num_iterations * self.num_mini_batches
            if self.max_steps > 0 and self.max_steps != steps:  # equal in a copy of this config
                raise ConfigError(
                    f"max_steps={self.max_steps} has no effect beside total_episodes={self.total_episodes}, which "
                    f"makes {steps} optimizer steps. Give total_episodes alone, or unset it (total_episodes: null)."
                )
            self.max_steps = steps

    # TRL 1.12 wrote these into the config when training began; scripts read them.

    @property
    def batch_size(self) -> int:
        """Episodes of an update, over all processes."""
        return cast(int, self.generation_batch_size)  # None until __post_init__

    @property
    def local_batch_size(self) -> int:
        """Episodes of an update on this process."""
        return self.per_device_train_batch_size * cast(int, self.steps_per_generation)

    @property
    def micro_batch_size(self) -> int:
        """Episodes of a forward, over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def mini_batch_size(self) -> int:
        """Episodes of an optimizer step, over all processes."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def local_mini_batch_size(self) -> int:
        """Episodes of an optimizer step on this process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def num_total_batches(self) -> int | None:
        """Updates of the run; None where `total_episodes` does not say how many."""
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
                f"{self.gradient_accumulation_steps} already say how many episodes an update has. Leave "
                "steps_per_generation and generation_batch_size unset."
            )

    def _check_groups(self) -> None:
        size = cast(int, self.num_generations)
        if self.batch_size % size:
            raise ConfigError(
                f"The {self.batch_size} episodes of an update cannot be split into groups of num_generations={size}. "
                "Change per_device_train_batch_size or gradient_accumulation_steps."
            )
        eval_batch = self.per_device_eval_batch_size * self.world_size
        if self.eval_strategy != "no" and eval_batch % (self.num_generations_eval or size):
            raise ConfigError(
                f"An evaluation batch of {eval_batch} rows cannot be split into groups of num_generations={size}. "
                "Change per_device_eval_batch_size, or set num_generations_eval=1."
            )

    def _check_choices(self) -> None:
        for name, choices in {
            "critic": (None, *CRITICS),
            "kl_estimator": ESTIMATORS,
            "score_mode": MODES,
            "score_normalisation": KINDS,
            "stop_token": (None, "eos"),
        }.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(c for c in choices if c)
                raise ConfigError(f"{name}='{getattr(self, name)}' is unknown. Use one of: {listed}.")
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ConfigError(
                f"stop_token='eos' and stop_token_id={self.stop_token_id} are both set. Give one of them."
            )

    def _check_horizon(self) -> None:
        if self.kl_target is not None and self.kl_horizon <= self.batch_size:
            raise ConfigError(
                f"kl_horizon={self.kl_horizon} is not above the {self.batch_size} episodes of an update, "
                "which would throw the KL coefficient about. Use 10 times the episodes or more."
            )
