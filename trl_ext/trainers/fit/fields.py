"""The settings `memory*`, which our configs share, and which settings of a config were given."""

import os
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_headroom
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.planner.search import opt_ins_of
from trl_ext.memory.run.settle import MemorySetting, parse_memory

ON_OOM = ("split", "raise")


@dataclass
class MemoryFields:
    """Fields beside those of TRL's config. `given` names the settings that were given and not left at their default.

    `memory_plan` is the plan that the trainer makes from `memory`, None before and without it.
    """

    memory: str | None = field(
        default=None,
        metadata={
            "help": "Settle what decides memory before the model loads: auto for the cards of this machine, cards "
            "such as 4xA40-48GB, a preset's name, or the folder of a plan. Settings that you give stay. Without "
            "memory_allow nothing changes that the optimisation sees."
        },
    )
    memory_allow: str | None = field(
        default=None,
        metadata={"help": "What else memory may change, with commas between: lora, qlora, adam8bit, shorter, fewer."},
    )
    memory_headroom: str | None = field(
        default=None,
        metadata={
            "help": "Share of a card that memory keeps free, such as 0.05. Unset: 0.05, or that of a plan's folder."
        },
    )
    memory_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of the longest prompt, for memory. Unset: measured on the training rows."},
    )
    global_batch: int | None = field(
        default=None,
        metadata={
            "help": "Samples of an optimizer step over all processes, which memory splits into micro-batches and "
            "accumulation. Unset: what per_device_train_batch_size and gradient_accumulation_steps make."
        },
    )
    memory_rehearsal: bool | None = field(
        default=None,
        metadata={
            "help": "Before step 1, one micro-batch of the greatest length forward and backward, its gradients "
            "dropped: out of memory comes at once, not after hours. Unset: on where there is CUDA."
        },
    )
    memory_on_oom: str = field(
        default="split",
        metadata={
            "help": "When a forward runs out of memory. split: halve the micro-batch on all ranks and go on with the "
            "same gradients, where that is possible. raise: end with what would fit.",
            "choices": ON_OOM,
        },
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        vars(self).update(given=_given(cls, args, kwargs), memory_plan=None)
        return self

    def settle_memory_fields(self) -> None:
        """Check the fields, before anything else is checked; called first by `__post_init__`.

        Raises:
            ConfigError: An unknown card, preset or opt-in, a plan that is not there, or values that cannot be.
        """
        if self.memory_on_oom not in ON_OOM:
            raise ConfigError(f"memory_on_oom is {self.memory_on_oom!r}. Set it to one of {', '.join(ON_OOM)}.")
        for name in ("memory_prompt_length", "global_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}. It must be at least 1, or unset.")
        opt_ins = opt_ins_of((self.memory_allow or "").split(","))
        self.memory_setting: MemorySetting | None = None if self.memory is None else parse_memory(self.memory)
        if self.memory_setting is None:
            alone = [name for name in ("memory_allow", "memory_headroom", "global_batch") if getattr(self, name)]
            if alone:
                raise ConfigError(f"{alone[0]} has no effect without memory. Set memory='auto', or remove it.")
            return
        self.memory = self.memory_setting.name
        if self.memory_headroom is not None:
            self.memory_setting = replace(self.memory_setting, headroom_frac=parse_headroom(self.memory_headroom))
        self.memory_opt_ins = opt_ins
        for name, value in ALLOCATOR.items():
            os.environ.setdefault(name, value)  # read when CUDA starts


def _given(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Names of the fields that were passed; from a parser, which passes all, those that differ from their default."""
    known = {one.name: one for one in fields(cls) if one.init}
    passed = dict(zip(known, args, strict=False)) | kwargs
    if not known.keys() <= passed.keys():
        return frozenset(passed)
    given = set()
    for name, one in known.items():
        if passed[name] != (one.default if one.default_factory is MISSING else one.default_factory()):
            given.add(name)
    return frozenset(given)
