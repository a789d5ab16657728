"""Switch between several LoRA adapters on one frozen backbone, in a forward and in its recomputation.

Under activation checkpointing a layer runs twice: in the forward, and again in the backward, with the adapter that is
active *then*. Forward as actor, switch to critic, backward: no error, but gradients that are wrong by more than their
size. So every checkpointed layer stores the adapter of its forward and uses it again to recompute.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from trl_ext.compat.peft import adapter_layers, adapter_state, set_adapter_state
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.checkpointing import enable_checkpointing, is_checkpointing

ACTOR, CRITIC, REWARD = "actor", "critic", "reward"


def reward_role(index: int) -> str:
    """Return the role and adapter name of reward model `index`: reward, reward_1, reward_2, ..."""
    return f"{REWARD}_{index}" if index else REWARD


class Roles:
    """Switches the adapter of all layers at once, without changing `requires_grad`.

    PEFT's `set_adapter` also freezes the adapters that it deactivates, and DDP and DeepSpeed would lose them.

    Args:
        model: PeftModel with one adapter per role.
        adapters: Role: name of its adapter. The actor uses PEFT's active adapter, so that switching the adapters off
            in PEFT gives the reference model.
    """

    def __init__(self, model: Any, adapters: dict[str, str]):
        self._layers = adapter_layers(model)
        self._adapters = adapters

    @contextmanager
    def as_role(self, role: str) -> Iterator[None]:
        """Compute with the adapter of `role` inside the block."""
        with self._in_state(self._state() if role == ACTOR else ([self._adapters[role]], False)):
            yield

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the contexts that `torch.utils.checkpoint` enters around a forward and around its recomputation."""
        return nullcontext(), self._in_state(self._state())

    def _state(self) -> tuple[list[str], bool]:
        return adapter_state(self._layers[0])

    @contextmanager
    def _in_state(self, wanted: tuple[list[str], bool]) -> Iterator[None]:
        before = self._state()
        if before == wanted:
            yield
            return
        self._switch(wanted)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, state: tuple[list[str], bool]) -> None:
        for layer in self._layers:
            set_adapter_state(layer, state)


def pin_roles(model: Any, roles: Roles, options: Any = None) -> None:
    """Make every activation checkpoint of `model` store the adapter of its forward.

    Args:
        model: Causal model under the PeftModel. Trainers switch its checkpointing off and on around generation with
            `gradient_checkpointing_enable`, so this method is replaced.
        roles: Roles of the PeftModel.
        options: The training arguments' `gradient_checkpointing_kwargs`.
    """

    def enable_pinned(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
        settings = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if settings["use_reentrant"]:
            raise ConfigError(
                "Reentrant activation checkpointing cannot keep the adapters of actor and critic apart. Set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or critic='head'."
            )
        enable_checkpointing(model, {**settings, "context_fn": roles.checkpoint_contexts}, **others)

    model.gradient_checkpointing_enable = enable_pinned
    if is_checkpointing(model):
        enable_pinned(options)
