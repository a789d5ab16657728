"""LoRA and its kin on a reward model: the score head must learn, and be saved with the adapter."""

import copy
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


def for_reward_model(config: Any) -> Any:
    """The PEFT config with the task type SEQ_CLS, under which PEFT trains and saves the head; None stays None.

    With TRL's default, CAUSAL_LM, the head would stay random and frozen.
    """
    task = getattr(config, "task_type", "SEQ_CLS")
    if config is None or task == "SEQ_CLS":
        return config
    changed = copy.deepcopy(config)
    changed.task_type = "SEQ_CLS"
    logger.warning(
        f"peft_config has task_type={getattr(task, 'value', task)!r}, which leaves the score head of a reward model "
        "random and frozen. It is trained with task_type='SEQ_CLS'."
    )
    return changed


def warn_of_frozen_head(model: Any) -> None:
    """Say so when an adapter that was given ready-made does not train the score head."""
    if not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".score." in name):
        logger.warning(
            "The score head of the given PEFT model is frozen, so its scores stay as they are drawn. Build the "
            "adapter with task_type='SEQ_CLS', or give the trainer a peft_config."
        )
