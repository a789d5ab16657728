"""Arguments of `trl_ext.RewardTrainer`: TRL's, ours of packing, and those of memory."""

from dataclasses import dataclass, field

from trl.trainer.reward_config import RewardConfig as TRLRewardConfig

from trl_ext.compat.deepspeed import announce_builds
from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.errors import ConfigError
from trl_ext.trainers.checkpoints.fields import ResumeFields
from trl_ext.trainers.checkpoints.secrets import PublicArguments
from trl_ext.trainers.ending.fields import EndingFields
from trl_ext.trainers.fit.fields import MemoryFields
from trl_ext.trainers.forward.sequence_parallel import check_other_ways
from trl_ext.trainers.packing import PACKING, SEQUENCE_PARALLEL, settle_packing
from trl_ext.trainers.setting_checks import check_deepspeed_file, check_numbers, choose_precision


@dataclass(repr=False)
class RewardConfig(PublicArguments, MemoryFields, ResumeFields, EndingFields, TRLRewardConfig):
    """TRL's `RewardConfig` with packing and with memory that is planned.

    After construction `packing` is True or False, and `packing_is_required` tells whether True was asked for.
    """

    packing: bool | None = field(default=None, metadata=PACKING)
    share_prompt: bool = field(
        default=True,
        metadata={"help": "Forward what chosen and rejected have in common once for both, instead of once each."},
    )
    max_tokens_per_forward: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens in one forward. The pairs of an optimizer step are then spread over as few forwards "
            "of at most this many tokens as possible, balanced over all processes. The loss stays TRL's. "
            "Unset: one forward per micro-batch of per_device_train_batch_size pairs."
        },
    )
    sequence_parallel: int = field(default=1, metadata=SEQUENCE_PARALLEL)
    max_length_policy: str = field(
        default="drop",
        metadata={
            "help": "What becomes of a pair with a side longer than max_length. drop: it is left out, as in TRL, and "
            "counted. truncate_prompt: the oldest tokens that both sides share are cut off.",
            "choices": ("drop", "truncate_prompt"),
        },
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        self.settle_memory_fields()
        self.check_resume_fields()
        check_other_ways(self)
        check_deepspeed_file(self.deepspeed)
        announce_builds()
        choose_precision(self)
        with old_names_unsaid():  # TRL's default has one
            super().__post_init__()
        settle_packing(self)
        if self.max_tokens_per_forward is not None and self.max_tokens_per_forward < 2:
            raise ConfigError(
                f"max_tokens_per_forward={self.max_tokens_per_forward} cannot hold a pair. Set it to the tokens that "
                "fit into one forward, such as 8192."
            )
