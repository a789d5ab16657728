"""The passes that PPO's targets need before an update, made by the update's own forwards.

Advantages contain the KL and the critic's values, so that they wait for the passes, and the passes for the plan of the
update. TRL shuffles rows between generation and plan; targets read them in the order in which they were generated.

Legend: B rows, T completion tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trl_ext.trainers.grpo.log_probs import OLD, REFERENCE, UpdatePasses
from trl_ext.trainers.ppo.critic.critics import Critic
from trl_ext.trainers.ppo.critic.values import OUTPUTS, CriticValues
from trl_ext.trainers.step.rows import Rollouts

# A row's place in the generation of its rank.
_PLACE = "place_in_generation"
_OF_PASSES = (OLD, REFERENCE, OUTPUTS)
_READ = ("completion_ids", "completion_mask", "tool_mask", *_OF_PASSES)
_WRITTEN = ("advantages", "returns", "values")


class TargetPasses(UpdatePasses):
    """Delays TRL's passes as `UpdatePasses` does, and makes the critic's pass with them.

    Attributes:
        precede_targets: True while the targets of the rollouts that were generated last wait for the passes.
    """

    def __init__(self, *of_passes: Any, critic: Critic, values: CriticValues):
        super().__init__(*of_passes)
        self._critic, self._values = critic, values
        self.precede_targets = False

    def take(self, rollouts: Rollouts) -> None:
        super().take(rollouts)
        critic, beta = self._critic, self._trainer.beta
        self.precede_targets = self._can_wait and bool(beta or critic.has_values)
        if not self.precede_targets:
            return
        ids = rollouts["completion_ids"]
        rollouts[_PLACE] = torch.arange(len(ids), device=ids.device)
        if OLD not in self._due and (beta or critic.comes_with_log_probs):
            self._due.append(OLD)
        if critic.has_values and not critic.comes_with_log_probs:
            self._due.append(OUTPUTS)

    def make(self, micro_batches: Sequence[Rollouts]) -> None:
        is_due = bool(self._due)
        super().make(micro_batches)
        if is_due:
            self._values.forget()
            self._critic.after_rollout()

    def rollouts(self, micro_batches: Sequence[Rollouts]) -> Rollouts:
        """Return what targets read of a generation, as it was generated: columns [B, T]."""
        order = torch.cat([one[_PLACE] for one in micro_batches]).argsort()
        names = [name for name in _READ if name in micro_batches[0]]
        return {name: torch.cat([one[name] for one in micro_batches])[order] for name in names}

    def put_targets(self, rollouts: Rollouts, micro_batches: Sequence[Rollouts]) -> None:
        """Put the targets of `rollouts` into the micro-batches, which lose what only targets read."""
        for micro_batch in micro_batches:
            place = micro_batch.pop(_PLACE)
            micro_batch.update({name: rollouts[name][place] for name in _WRITTEN if name in rollouts})
            for name in _OF_PASSES:
                if name not in rollouts:
                    micro_batch.pop(name, None)
        self.precede_targets = False
        self._planner.plan_again()

    def _needed(self, due: list[str], number: int) -> list[str]:
        return due if self.precede_targets else super()._needed(due, number)

    def _columns(self, name: str, model: Any, batch: Rollouts) -> Rollouts:
        self._values.forget()
        columns = {} if name == OUTPUTS else super()._columns(name, model, batch)
        if name == OUTPUTS or (name == OLD and self._critic.comes_with_log_probs):
            columns[OUTPUTS] = self._values.in_loss(model, batch)
        return columns
