"""The weights of a reference model that moves with the policy (`sync_ref_model`), saved in checkpoints."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_ext.errors import ConfigError

_FILE = "reference.safetensors"


def check_saved(checkpoint: str) -> None:
    """Raise ConfigError for a checkpoint without the reference; a missing folder is accepted here."""
    if Path(checkpoint).is_dir() and not Path(checkpoint, _FILE).is_file():
        raise ConfigError(
            f"{checkpoint} has no {_FILE}, from which sync_ref_model=True goes on: TRL's and "
            "runs without it save none. Give the folder as the model of a new run."
        )


def save(model: nn.Module, folder: str, *, is_writer: bool) -> None:
    """Write the reference's full weights. Collective if they are sharded."""
    weights = {}
    for name, parameter in model.named_parameters():
        with _gathered(parameter):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if is_writer:
                weights[name] = whole.detach().cpu().clone(memory_format=torch.contiguous_format)
    if is_writer:
        save_file(weights, Path(folder) / _FILE)


def load(model: nn.Module, checkpoint: str) -> None:
    """Load the weights that `save` wrote into the reference; every process reads the file. Collective if sharded."""
    with safe_open(Path(checkpoint) / _FILE, "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            saved = file.get_tensor(name)
            if isinstance(parameter, DTensor):
                saved = distribute_tensor(saved.to(parameter.device), parameter.device_mesh, parameter.placements)
            with _gathered(parameter):
                parameter.copy_(saved)


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """Gather a parameter that ZeRO-3 has sharded within the context, and write changes back after it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
