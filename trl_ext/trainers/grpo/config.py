"""Arguments of `trl_ext.GRPOTrainer`: TRL's, and ours for packing, generation and memory."""

from dataclasses import dataclass
from typing import Any

from trl.trainer.grpo_config import GRPOConfig as TRLGRPOConfig

from trl_ext.compat.vllm import server_words
from trl_ext.trainers.forward.reward_input import EOS_CHOICES
from trl_ext.trainers.generation.curriculum import check_curriculum
from trl_ext.trainers.generation.oversampling import check_oversample
from trl_ext.trainers.settings.config import ExtendedConfig
from trl_ext.trainers.settings.values import check_correction, setting


@dataclass(repr=False)
class GRPOConfig(ExtendedConfig, TRLGRPOConfig):
    """TRL's `GRPOConfig` with settings of packing, generation and planned memory."""

    share_prompt: bool = setting(
        True,
        "Forward a prompt once for all its completions in the same forward, and any other common prefix of rows, such "
        "as turns of a conversation. False: once per completion.",
    )
    max_tokens_per_forward: int | None = setting(
        None,
        "Most tokens in one forward and its backward; lower it to save memory. The rows of an optimizer step go "
        "through as few forwards as possible, balanced over all processes; the loss is the same. Refused if a "
        "micro-batch cannot be split: entropy bonus, top_entropy_quantile, auxiliary loss of a mixture of experts. "
        "Unset: the tokens of the largest packed micro-batch.",
    )
    skip_zero_advantage: bool | None = setting(
        None,
        "Leave completions of zero advantage (groups with equal rewards) out of the update, since they have no "
        "gradient. The metric entropy is then over the trained completions. False: forward them. Unset: True unless "
        "they have a gradient (KL penalty, entropy bonus or auxiliary loss).",
    )
    eval_temperature: float | None = setting(
        None,
        "Sampling temperature in evaluation. 0: greedy, for repeatable held-out accuracy. Unset: temperature.",
    )

    generation_ahead: int = setting(
        0,
        "1: vLLM servers generate the next batch of samples during training. The samples are then a batch older than "
        "the policy, which importance ratios correct, per token and truncated at 2 unless "
        "vllm_importance_sampling_mode is set. 0: generate, then train.",
    )
    oversample: float = setting(
        1.0,
        "Sample this many times the groups of an update; spare groups replace groups without variance (DAPO's dynamic "
        "sampling). 1.5 samples half as many again. 1: off.",
    )
    curriculum: dict[str, Any] | str | None = setting(
        None,
        "Draw rows by their running pass rate, most often near `target`, as '{\"target\": 0.5}'. Keys: target (0.5); "
        "threshold (1.0), the least total reward of a passing completion. Unset: all rows equally.",
    )
    vllm_server_options: dict[str, Any] | str | None = setting(
        None,
        'More options of `vllm serve` for servers that --vllm_servers starts, as \'{"kv_cache_dtype": "fp8"}\'. '
        "true and false are flags, a mapping is JSON.",
    )
    reward_model_eos: str = setting(
        "auto",
        "EOS after plain text for a reward model whose folder has no reward_input.json. append: as in training by "
        "TRL's RewardTrainer. never: for a model that was trained without EOS. auto: append in PPO; in GRPO no "
        "special tokens, as in TRL, with a warning.",
        choices=EOS_CHOICES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self)
        check_curriculum(self)
        server_words(self.vllm_server_options)
        if self.memory is None:  # a plan sets the batch later
            check_oversample(self)
