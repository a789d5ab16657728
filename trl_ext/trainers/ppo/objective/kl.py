"""The KL to the reference as a term of the loss, with kl_term="loss"; `targets.py` adds it to the reward.

Legend: B rows, T completion tokens.
"""

from typing import Any

import torch

from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.grpo.log_probs import REFERENCE
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.objective.equations import AdaptiveKL, kl_estimate
from trl_ext.trainers.step.rows import counted_tokens
from trl_ext.trainers.step.score import LogProbs


class KLTerm(RolloutPart):
    """Adds the KL to the loss of a forward, from the log-probabilities of the same forward.

    Args:
        trainer: The trainer whose loss it is.
        coefficient: Of the KL.
        estimator: Of the KL, as in `kl_estimate`.
    """

    def __init__(self, trainer: GRPOTrainer, coefficient: AdaptiveKL, estimator: str):
        self._trainer, self._coefficient, self._estimator = trainer, coefficient, estimator
        self._logps: torch.Tensor | None = None  # [B, T] of the policy's last forward with a gradient

    def after_scoring(self, trainer: RolloutTrainer, result: LogProbs) -> None:
        """Keep the log-probabilities of a forward with a gradient."""
        if torch.is_grad_enabled():
            self._logps = result.logps

    def add_to(self, loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of the last forward, with the KL if rollouts have the reference's log-probabilities.

        Args:
            loss: [] of the policy.
            inputs: The rows of the forward.
        """
        logps, self._logps = self._logps, None  # kept no longer than this loss
        if REFERENCE not in inputs:
            return loss
        assert logps is not None, "The loss comes after its forward."
        kl = kl_estimate(logps, inputs[REFERENCE], self._estimator)
        kl_loss = torch.where(counted_tokens(inputs).bool(), kl, 0.0).sum() / num_tokens_of_mean(self._trainer, inputs)
        self._trainer.record_metric("loss/kl_avg", kl_loss.detach())
        return loss + self._coefficient.value * kl_loss


def num_tokens_of_mean(trainer: GRPOTrainer, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the divisor of a sum over tokens that adds up to a mean over micro-batches and ranks."""
    args: Any = trainer.args
    share = trainer.current_gradient_accumulation_steps / args.steps_per_generation
    return inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes * share
