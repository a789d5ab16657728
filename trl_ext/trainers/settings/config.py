"""Settings that our configs add to TRL's: packing, memory, the end of a run and its resume."""

import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from trl_ext.compat.deepspeed import announce_builds, make_groups_once
from trl_ext.compat.liger import HEADS
from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import Row, check
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.planner.run import MemorySetting, parse_memory
from trl_ext.trainers.checkpoints.fingerprint import PARTS
from trl_ext.trainers.checkpoints.secrets import PublicArguments
from trl_ext.trainers.settings.former import check_names
from trl_ext.trainers.settings.values import (
    RUN,
    check_choices,
    check_deepspeed_file,
    check_numbers,
    check_types,
    choose_precision,
    default_of,
    setting,
)
from trl_ext.trainers.step.sequence_parallel import check_other_ways

# Aspects in which run and checkpoint are compared, and "manifest": the checkpoint's files are complete.
DESPITE = ("manifest", *PARTS)


@dataclass(repr=False)
class ExtendedConfig(PublicArguments):
    """Base class in front of a TRL config.

    After construction `packing` is True or False, and `packing_is_required` is True if True was asked for. `given` has
    the names of settings that do not have their default. `memory_plan` is the plan that the trainer makes from
    `memory`, else None.
    """

    packing: bool | None = setting(
        None,
        "Forward flat rows of real tokens instead of padded batches. Unset: packed, or TRL's padded batches with a "
        "warning if the model is not exact when packed. True: packed, or stop before the first step. False: padded.",
    )
    layer_kernels: bool | None = setting(
        None,
        "Use Liger's fused kernels for norms, rotary positions and gated MLPs in packed rows. Unset: used on a card "
        "if liger-kernel is installed and the self-check finds the same numbers. True: used, or stop before the "
        "first step. False: not used.",
    )
    sequence_parallel: int = setting(
        1,
        "Neighbouring processes that share each row (Ulysses), for rows that are too long for one card: each "
        "forwards a part of the tokens, with the same result. Must divide the number of processes and the model's "
        "attention heads. 1: every process forwards whole rows.",
    )
    memory: str | None = setting(
        None,
        "Choose the settings that decide memory before the model loads: auto for the cards of this machine, cards "
        "such as 4xA40-48GB, a preset's name, or a plan's folder. Settings that you give stay, and "
        "the optimisation does not change.",
    )
    memory_prompt_length: int | None = setting(
        None, "Tokens of the longest prompt, for memory. Unset: measured on the training rows."
    )
    global_batch: int | None = setting(
        None,
        "Samples of an optimizer step over all processes, which memory divides into micro-batches and accumulation. "
        "Unset: the product of per_device_train_batch_size, gradient_accumulation_steps and processes.",
    )
    memory_rehearsal: bool | None = setting(
        None,
        "Before step 1, forward and backward one micro-batch of the greatest length and drop its gradients, so that "
        "a run without enough memory ends at once. Unset: on with CUDA.",
    )
    memory_on_oom: str = setting(
        "split",
        "When a forward runs out of memory. split: halve the micro-batch on all ranks and go on with the same "
        "gradients, if possible. raise: end the run and name settings that would fit.",
        choices=("split", "raise"),
    )
    resume_despite: list[str] | None = setting(
        None,
        "Differences between run and checkpoint that do not stop a resume: model, rules, rewards, data, processes, "
        "seed, settings; manifest for a checkpoint not known to be complete, such as one of TRL's trainers.",
    )
    overwrite: bool = setting(
        False,
        "Start although output_dir has checkpoints of an earlier run, and remove them before step 1. A resumed run "
        "removes nothing. False: refuse to start.",
    )
    save_on_signal: bool | None = setting(
        None,
        "On SIGTERM or one Ctrl-C, save a checkpoint at the end of the optimizer step, on all processes, and end "
        "with exit code 75; a second Ctrl-C ends at once. Unset: on, except with save_strategy='no'.",
    )

    contradictions: ClassVar[tuple[Row, ...]] = RUN

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_names(cls, kwargs)
        self = super().__new__(cls)
        vars(self).update(given=_given(cls, args, kwargs), memory_plan=None)
        return self

    def __post_init__(self) -> None:
        """Check our settings, and the machine and files that they name, then TRL's. Raises ConfigError for an unknown
        card or preset, a missing plan, or an impossible value."""
        check_types(self)
        check_numbers(self)
        check_choices(self, type(self))
        check(self, RUN)
        self.memory_setting: MemorySetting | None = None if self.memory is None else parse_memory(self.memory)
        if self.memory_setting is not None:
            self.memory = self.memory_setting.name
            for name, value in ALLOCATOR.items():
                os.environ.setdefault(name, value)  # read when CUDA starts
        if isinstance(self.resume_despite, str):  # YAML gives a single name as a string
            self.resume_despite = self.resume_despite.replace(",", " ").split()
        for name in self.resume_despite or ():
            if name not in DESPITE:
                raise ConfigError(f"resume_despite names {name!r}. Use any of: {', '.join(DESPITE)}.")
        config: Any = self  # with TRL's fields
        if config.use_liger_kernel:  # transformers applies it again
            config.liger_kernel_config = (config.liger_kernel_config or {}) | dict.fromkeys(HEADS, False)
        check_other_ways(config)
        check_deepspeed_file(config.deepspeed)
        announce_builds()
        choose_precision(config)
        with old_names_unsaid():  # one of TRL's defaults uses an old name
            super().__post_init__()  # type: ignore[misc]  # TRL's
        if config.deepspeed_plugin is not None:  # needed before models load
            make_groups_once()
        self.packing_is_required = self.packing is True or config.max_tokens_per_forward is not None
        self.packing_is_required |= self.sequence_parallel > 1
        self.packing = self.packing is not False


def _given(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Return the names of fields that were passed; from a parser, which passes all, the fields without defaults."""
    known = {one.name: one for one in fields(cls) if one.init}
    passed = dict(zip(known, args, strict=False)) | kwargs
    if not known.keys() <= passed.keys():
        return frozenset(passed)
    given = set()
    for name, one in known.items():
        if passed[name] != default_of(one):
            given.add(name)
    return frozenset(given)
