"""Several LoRA adapters on one frozen backbone: which of them computes, in a forward and in its recomputation.

Under activation checkpointing a layer runs twice: in the forward, and again in the backward, with whatever adapter is
active *then*. Forward as actor, switch to critic, backward: no error, and gradients that are wrong by more than their
own size. So every checkpointed layer notes the adapter of its forward and takes it up again to recompute.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from trl_ext.compat.peft import adapter_layers, adapter_state, set_adapter_state
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.checkpointing import enable_checkpointing, is_checkpointing

ACTOR, CRITIC, REWARD = "actor", "critic", "reward"


def reward_role(index: int) -> str:
    """Return the role, and the adapter's name, of one of several reward models: reward, reward_1, reward_2, ..."""
    return f"{REWARD}_{index}" if index else REWARD


class Roles:
    """Switches the adapter of all layers at once, without touching what requires a gradient.

    PEFT's own `set_adapter` also freezes the adapters that it leaves, and DDP and DeepSpeed would lose them.

    Args:
        model: PeftModel with one adapter a role.
        adapters: Role: name of its adapter. The actor computes with whatever PEFT says is active, so that the
            reference can be had from PEFT by switching the adapters off.
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
        """Return what `torch.utils.checkpoint` puts around a forward, and around its recomputation."""
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
    """Let every activation checkpoint of `model` remember the adapter of its forward.

    Args:
        model: Causal model under the PeftModel. Trainers switch its checkpointing off and on around generation, always
            by `gradient_checkpointing_enable`; so that is where the pin goes.
        roles: Of the PeftModel.
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
