"""The attributes of a trainer that checkpoints are saved and compared by."""

from typing import Any, Protocol

from transformers import TrainerState


class SavedTrainer(Protocol):
    """A trainer of any kind.

    Args:
        args: Its config.
        state: Of transformers: steps, logs, the best checkpoint.
        memory_kind: "grpo", "ppo" or "reward".
        model: The trained model, unwrapped.
        train_dataset: Its rows.
        processing_class: Its tokenizer or processor.
        is_deepspeed_enabled, is_fsdp_enabled: Whether processes share the weights' states.
    """

    args: Any
    state: TrainerState
    memory_kind: str
    model: Any
    train_dataset: Any
    processing_class: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
