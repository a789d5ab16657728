"""A LoRA reward model on the actor's own backbone: the base weights are in memory once for all roles."""

from pathlib import Path
from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from trl_ext.trainers.forward.pooled_head import scored_token
from trl_ext.trainers.forward.roles import REWARD
from trl_ext.trainers.ppo.scores.reward_models import RewardModel, num_positions


class SharedRewardModel(RewardModel):
    """Scores completions with the adapter "reward" of the actor's PeftModel.

    Args:
        folder: Where the adapter lies; its name is the score's name in logs.
        tokenizer: The actor's: the adapter was trained on the same base model.
        options: As for RewardModel.
    """

    def __init__(self, folder: str, tokenizer: Any, **options: Any):
        self.folder = folder
        self._set_up(tokenizer, Path(folder).name, **options)
        self._pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def attach(self, trainer: Any) -> None:
        """Score with the trainer's actor, which has the adapter now."""
        self._trainer = trainer
        self.model = trainer.model.get_base_model()
        self.wrapped = self._call
        self._num_positions = num_positions(self.model)

    @property
    def packs(self) -> bool:
        """Whether forwards are flat rows; what holds for the actor holds for its backbone."""
        return self._trainer._packs

    def _prepare(self) -> None:
        """Nothing: the actor has been checked, and goes on training after this."""

    def _call(self, pool_index: torch.Tensor | None = None, **inputs: Any) -> SequenceClassifierOutputWithPast:
        values = self._trainer.model(role=REWARD, **{"use_cache": False, **inputs}).token_values
        if pool_index is not None:
            return SequenceClassifierOutputWithPast(logits=values[0, pool_index, None])
        ends = [scored_token(row, self._pad_token_id) for row in inputs["input_ids"].tolist()]
        return SequenceClassifierOutputWithPast(logits=values[range(len(ends)), ends, None])
