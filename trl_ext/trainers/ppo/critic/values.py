"""The critic's value before each completion token.

Legend: B rows, P prompt tokens, T completion tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trl_ext.trainers.forward.calls import calls_of
from trl_ext.trainers.forward.roles import CRITIC
from trl_ext.trainers.grpo.log_probs import OLD
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.critic.critics import Critic
from trl_ext.trainers.rows.images import KEYS, whole_rows
from trl_ext.trainers.step.forward import running_forward
from trl_ext.trainers.step.score import PaddedBatch, flat_batch, score_values

# The column of rollouts with the critic's outputs before an update.
OUTPUTS = "value_outputs"


class SampledNumbers(NamedTuple):
    """Numbers of the tokens that the policy sampled, [B, T] each; None if not needed."""

    log_probs: torch.Tensor | None  # under the sampling policy
    values: torch.Tensor | None  # before each token


class CriticValues:
    """Values of rollouts, from the policy's forwards if they return values, else from separate forwards.

    `log_probs` is TRL's method that forwards the policy.
    """

    def __init__(self, trainer: GRPOTrainer, critic: Critic, log_probs: Callable[..., Any]):
        self._trainer = trainer
        self.critic = critic
        self._log_probs = log_probs
        self._noted: list[torch.Tensor] = []

    def forget(self) -> None:
        """Drop the stored values."""
        self._noted.clear()

    def note(self, values: torch.Tensor | None) -> None:
        """Store the values [B, T] of a packed forward, if it has any."""
        if values is not None:
            self._noted.append(values)

    @contextmanager
    def noted_from(self, model: Any, width: int) -> Iterator[None]:
        """Store the values of padded forwards of `model` inside the block, for `width` completion tokens."""
        if self._trainer.step_settings.packs or not self.critic.comes_with_log_probs:
            yield
            return
        with calls_of(model) as calls:
            yield
        values = [o.token_values[:, -width - 1 : -1] for _, o in calls if o.get("token_values") is not None]
        if values:
            self._noted.append(torch.cat(values))

    def in_loss(self, actor: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return [B, T] values with gradient for the value loss; called after the policy's forward."""
        return self._noted[0] if self.critic.comes_with_log_probs else self.forwarded(actor, inputs)

    def with_log_probs(self, rollouts: dict[str, Any]) -> SampledNumbers:
        """Return the numbers of the sampled tokens.

        In training the update's forwards have added them. In evaluation they are made here, and no model uses dropout.
        """
        logps, values = rollouts.get(OLD), rollouts.pop(OUTPUTS, None)
        if values is not None:
            return SampledNumbers(logps, values)
        trainer = self._trainer
        rows: int = trainer.args.per_device_eval_batch_size
        if self.critic.comes_with_log_probs or (logps is None and trainer.beta):
            self.forget()
            ids, mask = whole_rows(rollouts)
            width = rollouts["completion_ids"].size(1)
            images = {name: rollouts[name] for name in KEYS if name in rollouts}
            logps, *_ = self._log_probs(trainer.model, ids, mask, width, batch_size=rows, **images)
            values = self._noted[0] if self._noted else None
        if self.critic.is_ready and not self.critic.comes_with_log_probs:
            critic = self.critic.model(trainer.model)
            was_training = critic.training
            critic.eval()
            values = self.forwarded(trainer.model, rollouts, batch_size=rows)
            critic.train(was_training)
        return SampledNumbers(logps, values)

    def forwarded(self, actor: Any, rollouts: Mapping[str, Any], batch_size: int | None = None) -> torch.Tensor:
        """Return [B, T] values of TRL's rollouts by separate forwards of `batch_size` rows; None: all rows at once."""
        model, trainer = self.critic.model(actor), self._trainer
        args: Any = trainer.args
        if running_forward() is None:
            batch_size = args.local_rollout_forward_batch_size or batch_size
        width = rollouts["completion_ids"].size(1)
        ids, mask = whole_rows(rollouts)
        with trainer.clock.phase("update" if torch.is_grad_enabled() else "logps"):
            if trainer.step_settings.packs:
                return self._pack(model, PaddedBatch(ids, mask, width, rollouts, batch_size))
            parts = zip(*(x.split(batch_size or len(ids)) for x in (ids, mask)), strict=True)
            return torch.cat([self._pad(model, one, of_one, width) for one, of_one in parts])

    def _pad(self, model: Any, input_ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        """Return the values before each completion token, [B, C], by a padded forward.

        Args:
            model: The critic, as training calls it.
            input_ids, mask: [B, P + C] padded rows.
            width: C, the completion width.
        """
        trainer = self._trainer
        if trainer.model.training:
            trainer.counts.add_forward(input_ids.numel(), mask, of_update=running_forward() is not None)
        with trainer.accelerator.autocast():
            outputs = model(input_ids=input_ids, attention_mask=mask, use_cache=False, role=CRITIC)
        return outputs.token_values[:, -width - 1 : -1]

    def _pack(self, model: Any, padded: PaddedBatch) -> torch.Tensor:
        """Return the values before each completion token, [B, C], by flat rows; `model` is the critic in training."""
        trainer, settings, forward = self._trainer, self._trainer.step_settings, running_forward()
        with trainer.accelerator.autocast():
            if forward is not None:
                values, num = score_values(
                    model,
                    forward.unpadded,
                    [forward.flat],
                    padded.input_ids.device,
                    num_forwards=1,
                    group=settings.group,
                    role=CRITIC,
                )
            else:
                flat = flat_batch(padded, settings, trainer.accelerator)
                values, num = score_values(
                    model,
                    flat.batch,
                    flat.rows,
                    padded.input_ids.device,
                    num_forwards=flat.num_forwards,
                    group=settings.group,
                    role=CRITIC,
                )
                values = flat.of_group.own(values)
        if trainer.model.training:
            trainer.counts.add_forward(num, padded.attention_mask, of_update=forward is not None)
        return values
