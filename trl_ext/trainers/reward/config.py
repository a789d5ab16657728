"""Arguments of `trl_ext.RewardTrainer`: TRL's arguments, ours for packing and memory, and PEFT with a score head."""

import copy
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging
from trl.trainer.reward_config import RewardConfig as TRLRewardConfig

from trl_ext.compat.peft import base_model, trains_module
from trl_ext.trainers.rows.prompts import config_of
from trl_ext.trainers.settings.config import ExtendedConfig
from trl_ext.trainers.settings.values import setting

logger = logging.get_logger(__name__)

HEAD = "score"  # of transformers' decoders with a sequence classification head


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


def for_reward_model(config: Any, model: Any, args: Any) -> Any:
    """Return a PEFT config that leaves no random score head frozen; None stays None.

    The task type becomes SEQ_CLS, with which PEFT trains and saves the head. A config stays as it is if it trains
    the head already (by `modules_to_save`, by `target_modules`, or by "all-linear" without a task type), or if it has
    no task type and the checkpoint of `model` (a model, name or folder) has a head.
    """
    task = getattr(config, "task_type", "SEQ_CLS")
    if config is None or task == "SEQ_CLS":
        return config
    trains_head = trains_module(config, HEAD, is_linear=task is None)
    if task is None and (trains_head or _has_head(config_of(model, args))):
        return config
    changed = copy.deepcopy(config)
    changed.task_type = None if trains_head else "SEQ_CLS"
    given = f"peft_config has task_type={getattr(task, 'value', task)!r}, "
    if trains_head:
        logger.warning(given + "which no reward model has. It is dropped: the config trains the score head by itself.")
    else:
        logger.warning(
            given + "which leaves the score head of a reward model frozen, and random if the checkpoint has no head. "
            "It is trained with task_type='SEQ_CLS'."
        )
    return changed


def warn_of_new_head(model: Any) -> None:
    """Warn if a new score head is frozen, or would not be saved with its adapter."""
    model_below = base_model(model)
    if _has_head(model_below.config) or not hasattr(model_below, HEAD):
        return
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and f".{HEAD}." in name]
    if not trained:
        logger.warning(
            "The score head of the given PEFT model is frozen, so its scores stay as they are drawn. Build the "
            "adapter with task_type='SEQ_CLS', or give the trainer a peft_config."
        )
    elif not any("modules_to_save" in name for name in trained):
        logger.warning(
            "The adapter is on top of a new score head, whose own weights PEFT does not save. Merge and save the "
            "whole model after training, or name the head in modules_to_save instead of target_modules."
        )


def _has_head(config: Any) -> bool:
    """Return True if the config is of a reward model's checkpoint, so that the head is not random."""
    return any("SequenceClassification" in name for name in getattr(config, "architectures", None) or ())
