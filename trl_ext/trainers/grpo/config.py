"""Arguments of `trl_ext.GRPOTrainer`: TRL's, ours of packing, and those of memory."""

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
    """TRL's `GRPOConfig` with packing and with memory that is planned."""

    share_prompt: bool = setting(
        True,
        "Forward a prompt once for all its completions in the same forward, instead of once each, and whatever else "
        "rows begin with in common: turns of conversations that fork.",
    )
    max_tokens_per_forward: int | None = setting(
        None,
        "Most tokens in one forward and its backward. The rows of an optimizer step are spread over as "
        "few forwards as hold them, balanced over all processes; the loss is the same, and one forward's "
        "activations are alive at a time. Refused where a micro-batch cannot be cut: entropy bonus, "
        "top_entropy_quantile, auxiliary loss of a mixture of experts. Unset: no forward takes more tokens than "
        "the largest micro-batch does packed.",
    )
    skip_zero_advantage: bool | None = setting(
        None,
        "Leave completions of zero advantage, those of groups with equal rewards, out of the update: they "
        "have no gradient. Unset: yes where that is so (no KL penalty, entropy bonus or auxiliary loss). The "
        "metric entropy is then over the completions that are trained. False: forward them all the same.",
    )
    eval_temperature: float | None = setting(
        None,
        "Sampling temperature during evaluation; 0 decodes greedily, which makes held-out accuracy "
        "repeatable. Unset: the training temperature.",
    )

    generation_ahead: int = setting(
        0,
        "1: vLLM servers generate the next block of samples while this one trains. Samples are then one block behind "
        "the policy, which importance ratios correct: unless vllm_importance_sampling_mode is set, per token, "
        "truncated at 2. 0: generate, then train.",
    )
    oversample: float = setting(
        1.0,
        "Sample so many times the groups of an update; before the update groups without variance are "
        "replaced by spares with variance (DAPO's dynamic sampling). 1.5 samples half as many again. 1: off.",
    )
    curriculum: dict[str, Any] | str | None = setting(
        None,
        "Draw rows by their running pass rate, those near `target` most, as '{\"target\": 0.5}'. Keys: target (0.5); "
        "threshold (1.0), the total reward from which on a completion passes; rest_after (2) visits all of whose "
        "completions passed a row rests for rest_for (100) generations. Unset: all rows alike.",
    )
    vllm_server_options: dict[str, Any] | str | None = setting(
        None,
        'More options of `vllm serve` for servers that --vllm_servers starts, as \'{"kv_cache_dtype": "fp8"}\'. '
        "true and false are flags, a mapping is JSON.",
    )
    reward_model_eos: str = setting(
        "auto",
        "Whether plain text that a reward model scores ends in EOS, where its folder has no reward_input.json. "
        "append: it does, as in training by TRL's RewardTrainer. never: for a model that was trained without. auto: "
        "append in PPO; in GRPO no special tokens at all, as in TRL; it warns.",
        choices=EOS_CHOICES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self)
        check_curriculum(self)
        server_words(self.vllm_server_options)
        if self.memory is None:  # a plan sets the batch later
            check_oversample(self)
