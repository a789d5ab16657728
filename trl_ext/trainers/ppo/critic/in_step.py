"""PPO's critic in GRPOTrainer's step: its values, its loss around the policy's, and its training.

Legend: B rows, T completion tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from trl_ext.compat.peft import base_model
from trl_ext.packing.check import CheckResult
from trl_ext.trainers.fit.rehearsal.inputs import MicroBatch, with_targets
from trl_ext.trainers.forward.gradient_sync import can_settle, settled
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.grpo.critic import CriticHooks
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.critic.critics import Critic
from trl_ext.trainers.ppo.critic.scale import ValueScale
from trl_ext.trainers.ppo.critic.values import CriticValues
from trl_ext.trainers.ppo.objective.equations import clipped_value_loss
from trl_ext.trainers.ppo.objective.kl import num_tokens_of_mean
from trl_ext.trainers.step.forward import Forward
from trl_ext.trainers.step.plan import StepPlanner
from trl_ext.trainers.step.rows import counted_tokens
from trl_ext.trainers.step.score import LogProbs


class CriticInStep(CriticHooks):
    """Lets a critic of any kind take part in the step.

    Args:
        trainer: The trainer of the actor.
        critic: The critic, attached to the actor.
        values: Its values.
        scale: The scale on which it predicts.
        planner: Plans the rehearsal's forward.
    """

    def __init__(
        self, trainer: GRPOTrainer, critic: Critic, values: CriticValues, scale: ValueScale, planner: StepPlanner
    ):
        super().__init__(critic.models())
        self._trainer, self._critic, self._values, self._scale = trainer, critic, values, scale
        self._planner = planner
        self._forwards: Sequence[Forward] = ()  # of the micro-step
        self.num_passes = critic.num_passes
        self.why_all_rows_count = "the critic learns from every row" if critic.has_values else ""

    # Forwards -----------------------------------------------------------------------------------------------------

    def self_check(self, result: CheckResult) -> CheckResult:
        """Check a separate critic, too."""
        return self._critic.self_check(result)

    def by_role(self, weights: list[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        """Separate the critic's weights from the policy's."""
        critic = self._critic.parameters()
        own = {id(weight) for weight in critic}
        policy = {"policy": [weight for weight in weights if id(weight) not in own]}
        return policy | ({"critic": critic} if self._critic.has_values else {})

    def scoring(self, model: Any, width: int) -> AbstractContextManager[None]:
        """Store the values of a value head."""
        return self._values.noted_from(model, width)

    def after_scoring(self, trainer: RolloutTrainer, result: LogProbs) -> None:
        """Store the values of a value head."""
        self._values.note(result.values)

    # Loss ---------------------------------------------------------------------------------------------------------

    def loss_before_policy(self, actor: Any, inputs: dict[str, Any], *, is_warmup: bool) -> torch.Tensor | None:
        """Prepare the policy's forward; return an adapter's value loss, None for other critics.

        An adapter runs its backward here, so that its activations are freed before the policy's forward.

        Args:
            actor: The policy as training calls it.
            inputs: The rows of the forward.
            is_warmup: True while the critic alone learns.
        """
        critic, trainer = self._critic, self._trainer
        self._values.forget()
        if critic.comes_with_log_probs:
            model: Any = base_model(trainer.model)
            model.values_train_head_alone = is_warmup
        if not (critic.has_separate_forward and trainer.model.training and can_settle(trainer)):
            return None
        # Unwrapped: the engine around the model would count this backward as the step's.
        values = self._values.forwarded(trainer.accelerator.unwrap_model(actor, keep_torch_compile=True), inputs)
        return settled(self._loss(values, inputs), critic.parameters())

    def add_to(
        self, loss: torch.Tensor, value_loss: torch.Tensor | None, actor: Any, inputs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the policy's loss, with the value loss if the actor's optimizer trains the critic.

        Args:
            loss: [] of the policy.
            value_loss: From `loss_before_policy`.
            actor: The policy as training calls it.
            inputs: The rows of the forward.
        """
        if not self._critic.is_trained_with_actor:
            return loss
        if value_loss is None:
            value_loss = self._loss(self._values.in_loss(actor, inputs), inputs)
        return loss + value_loss

    def _loss(self, values: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return `vf_coef` times the loss of values [B, T]; it adds up to a mean over the tokens of the step."""
        args: Any = self._trainer.args
        mask, scale, num_tokens = counted_tokens(inputs), self._scale, num_tokens_of_mean(self._trainer, inputs)
        old_values, returns = scale.outputs(inputs["values"]), scale.outputs(inputs["returns"])
        values = scale.standardised(values)
        result = clipped_value_loss(values, old_values, returns, mask, args.cliprange_value, num_tokens)
        num_counted = mask.sum()
        self._trainer.record_metric("loss/value_avg", result.loss.detach())
        share = result.num_clipped / num_counted.clamp(min=1)
        self._trainer.record_metric("val/clipfrac_avg", share, weight=num_counted)
        return args.vf_coef * result.loss

    # Training -----------------------------------------------------------------------------------------------------

    def begin_micro_step(self, forwards: Sequence[Forward]) -> None:
        """Keep the forwards for a separate critic."""
        self._forwards = forwards

    def train(self, actor: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Train a separate critic on the forwards of the micro-step."""
        forwards, self._forwards = self._forwards, ()
        return self._critic.train_on(
            forwards,
            self._trainer.forward_loop,
            lambda batch: self._loss(self._values.forwarded(actor, batch), batch),
            loss,
        )

    def with_columns(self, batch: MicroBatch) -> MicroBatch:
        """Add PPO's targets."""
        return with_targets(batch, has_values=self._critic.has_values)

    @contextmanager
    def rehearsing(self, batch: MicroBatch) -> Iterator[None]:
        """Train a separate critic after the actor's backward."""
        self._critic.after_rollout()
        yield
        if self.models:
            self.begin_micro_step([self._planner.as_one(batch.inputs)])
            self.train(self._trainer.model_wrapped, torch.zeros((), device=self._trainer.accelerator.device))
        self._values.forget()

    # Checkpoints --------------------------------------------------------------------------------------------------

    def check_checkpoint(self, folder: str) -> None:
        """Raise ConfigError unless the checkpoint holds a critic of this kind."""
        critic_files.check(folder, self._critic.name)

    def load_weights(self, folder: str, *, are_loaded: bool) -> None:
        """Load the critic's weights, unless they are, and the scale of its values."""
        if not are_loaded:
            self._critic.load(folder)
        if critic_files.has_state(folder):  # absent with save_only_model
            self._scale.load_state_dict(critic_files.read_state(folder)["values"])

    def save(self, trainer: RolloutTrainer, folder: str) -> None:
        """Write the optimizer of a separate critic."""
        self._critic.save_training_state(folder)

    def load(self, trainer: RolloutTrainer, checkpoint: str) -> None:
        """Let a separate critic load its optimizer when training begins."""
        self._critic.resume_from(checkpoint)
