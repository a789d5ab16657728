"""Arguments of `trl_ext.RewardTrainer`: TRL's arguments, and ours for packing and memory."""

from dataclasses import dataclass

from trl.trainer.reward_config import RewardConfig as TRLRewardConfig

from trl_ext.errors import ConfigError
from trl_ext.trainers.settings.config import ExtendedConfig
from trl_ext.trainers.settings.values import setting


@dataclass(repr=False)
class RewardConfig(ExtendedConfig, TRLRewardConfig):
    """TRL's `RewardConfig` with packing and planned memory."""

    share_prompt: bool = setting(
        True, "Forward the common prefix of chosen and rejected once for both, instead of once each."
    )
    max_tokens_per_forward: int | None = setting(
        None,
        "Most tokens in one forward. The pairs of an optimizer step are then spread over as few forwards "
        "of at most this many tokens as possible, balanced over all processes. The loss stays TRL's. "
        "Unset: one forward per micro-batch of per_device_train_batch_size pairs.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens_per_forward is not None and self.max_tokens_per_forward < 2:
            raise ConfigError(
                f"max_tokens_per_forward={self.max_tokens_per_forward} cannot hold a pair. Set it to the tokens that "
                "fit into one forward, such as 8192."
            )
