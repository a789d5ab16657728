"""The attributes of a trainer that its memory is watched and explained by."""

from typing import Any, Protocol

from transformers import TrainerCallback, TrainerState

from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.step.trainer import RunningTrainer


class FittedTrainer(RunningTrainer, Protocol):
    """A trainer of any kind, whose runs can be out of memory.

    Args:
        state: Of transformers: the steps taken.
        memory_kind: "grpo", "ppo" or "reward".
        model, model_wrapped: The trained model, and what its forwards call.
        train_dataset: Its rows.
        processing_class: Its tokenizer or processor.
        optimizer: Its optimizer, made when training begins.
        is_deepspeed_enabled: Whether an engine of DeepSpeed takes the steps.
        clock: Measures the phases of a step.
        faster_checkpointing: Options that would fit on the card and make updates shorter, in words; or empty.
        forward_loop: Runs the planned forwards; `last` is the running forward.
        check_packing: Decides how rows are forwarded. Collective.
        add_metric: Adds a value to the metrics of this step.
    """

    state: TrainerState
    memory_kind: str
    model: Any
    train_dataset: Any
    processing_class: Any
    model_wrapped: Any
    optimizer: Any
    is_deepspeed_enabled: bool
    clock: PhaseClock
    faster_checkpointing: str

    @property
    def forward_loop(self) -> Any: ...

    def check_packing(self, model: Any) -> None: ...

    def add_metric(self, name: str, value: float) -> None: ...

    def add_callback(self, callback: TrainerCallback) -> None: ...


class RehearsedTrainer(FittedTrainer, Protocol):
    """A trainer that can forward its largest micro-batch before the first step.

    Args:
        largest_micro_batch: Returns that micro-batch, as `rehearsal.inputs` makes it.
        rehearse: Takes TRL's step on it.
        why_not_rehearse: Returns why no rehearsal is possible, the same on all ranks; empty if it is.
    """

    def largest_micro_batch(self) -> Any: ...

    def rehearse(self, batch: Any) -> None: ...

    def why_not_rehearse(self) -> str: ...
