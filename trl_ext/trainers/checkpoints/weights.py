"""Loading of a checkpoint's weights, with an error if trained weights are missing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_ext.compat.swap import swapped
from trl_ext.errors import ConfigError


@contextmanager
def loading(trainer: Any, folder: str) -> Iterator[None]:
    """Let the trainer load a checkpoint inside the block, and raise ConfigError if it lacks trained weights.

    DeepSpeed and FSDP write and load by the model's names, and PEFT converts names itself.
    """
    model = trainer.model
    is_split = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    is_whole = isinstance(model, PreTrainedModel) and not is_split
    dropped = {"load_state_dict": lambda *_, **__: None} if is_whole else {}  # Trainer loads without conversion
    with nullcontext() if is_split else all_loaded(model, folder):
        with swapped(model, **dropped), swapped(trainer, _issue_warnings_after_load=lambda _: None):
            yield
        if is_whole and Path(folder).is_dir():
            load_pretrained(model, folder)
        trainer.load_own_weights(folder)


@contextmanager
def all_loaded(model: torch.nn.Module, folder: str | Path) -> Iterator[None]:
    """Raise ConfigError after the block if it has not written all trained weights of the model."""
    before = {name: weight._version for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        yield
        lacking = [name for name, version in before.items() if model.get_parameter(name)._version == version]
    except KeyError as error:  # from PEFT, for a module that is trained in addition to an adapter
        lacking = [str(error)]
    if lacking:
        raise ConfigError(
            f"The checkpoint {folder} lacks {len(lacking)} of {len(before)} trained weights: {', '.join(lacking[:4])}"
            f"{', ...' if lacking[4:] else ''}. Resume from one that holds them, or begin a new run."
        )


def load_pretrained(model: Any, folder: str | Path) -> None:
    """Load weights that `save_pretrained` wrote, by the names of the file; other weights stay as they are.

    Issue: transformers writes the hub's names, and its Trainer loads only those that the model has: 48805, 43701.
    Fixed in: no version of transformers up to 5.24; pull request 48822, for mixtures of experts, is open.
    Remove when: Trainer's `_load_from_checkpoint` and `_load_best_model` load by the names of the file.
    """
    # The model's widest type, so that no weight is rounded.
    dtype = reduce(torch.promote_types, {one.dtype for one in model.state_dict().values() if one.is_floating_point()})
    read, report = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    found = {name: value for name, value in read.state_dict().items() if name not in report["missing_keys"]}
    model.load_state_dict(found, strict=False)
