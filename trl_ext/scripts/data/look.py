"""Check rows with the trainers' checks before a model is loaded: in `trl-ext check`, and in runs whose trainer checks
only after loading.
"""

from collections.abc import Sequence
from typing import Any

ROLES = ("train_dataset", "eval_dataset")
NOT_APPLIED = "The prompts are text, and the model's chat template is not applied."
AS_MEANT = "prompt_format: chat asks as a user would; prompt_format: text confirms that this is meant."


def look_at_prompts(
    parts: Sequence[Any], model_name: str, training_args: Any, rewards: Sequence[Any], tokenizer: Any = None
) -> None:
    """Raise DataError for rows that GRPO or PPO would refuse.

    `parts` are training rows, and held-out rows or None; rows of token ids, for PPO, are not checked here. The model
    is not loaded; its tokenizer is, if it is None.
    """
    from trl_ext.trainers.rows.prompts import PromptChecks
    from trl_ext.trainers.rows.sentence import columns_of

    checks = PromptChecks(model_name, list(rewards), training_args, {"processing_class": tokenizer})
    for part, role in zip(parts, ROLES, strict=True):
        if part is not None and "input_ids" not in columns_of(part, role):
            checks.look_at(part, role)


def look_at_pairs(parts: Sequence[Any], training_args: Any, tokenizer: Any = None) -> None:
    """Raise DataError for pairs that the reward trainer would refuse; with `tokenizer`, chats need its template."""
    from trl_ext.trainers.rows.pairs import check_pairs

    # A template that the recipe names replaces the tokenizer's.
    reader = None if training_args.chat_template_path else tokenizer
    for part, role in zip(parts, ROLES, strict=True):
        if part is not None:
            check_pairs(part, role, reader)
