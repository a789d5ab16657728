"""The attributes and methods of a trainer by which a script runs it."""

from typing import Any, Protocol

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerState


class ScriptTrainer(Protocol):
    """A trainer of this package, of any kind.

    Args:
        args: Its config.
        state: Of transformers: steps, logs, the best checkpoint.
        accelerator: Its accelerator.
        memory_kind: "grpo", "ppo" or "reward".
        reports_itself: False if `report` is called once the model is saved.
        saves_afterwards: True if the caller of `train` saves the model next, and then calls `end_signals`.
    """

    args: Any
    state: TrainerState
    accelerator: Accelerator
    memory_kind: str
    reports_itself: bool
    saves_afterwards: bool

    def add_callback(self, callback: TrainerCallback) -> None: ...

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any: ...

    def end_signals(self) -> None: ...

    def report(self) -> None: ...

    def save_model(self, output_dir: str | None = None) -> None: ...

    def save_state(self) -> None: ...

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None) -> None: ...

    def is_world_process_zero(self) -> bool: ...

    def push_to_hub(self, *, dataset_name: str | None) -> Any: ...
