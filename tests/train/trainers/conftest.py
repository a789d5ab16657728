"""Trainers of these tests share what packing's self-check finds of equal models."""

import hashlib
from typing import Any

import pytest
import torch

from tests.faults.starting import IS_THOROUGH

MOST_WEIGHTS = 1_000_000  # of a model whose result is kept: hashing more takes as long as the check
FOUND: dict[tuple[Any, ...], Any] = {}


def described(model: torch.nn.Module) -> tuple[str, str]:
    """The config of a model, and a hash of its weights."""
    weights = hashlib.blake2b()
    for name, weight in model.state_dict().items():
        weights.update(f"{name} {weight.dtype} ".encode())
        weights.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return repr(model.config), weights.hexdigest()


@pytest.fixture(autouse=True)
def models_are_checked_once(request, monkeypatch):
    """A trainer's self-check takes a sixth of the seconds of these tests, mostly on models that an earlier test had.

    `make nightly` checks each; so do the tests that are marked `own_self_check`, which change what a model computes.
    """
    if IS_THOROUGH or request.node.get_closest_marker("own_self_check"):
        return
    from trl_ext.trainers.base.packing import PackingSwitch

    check = PackingSwitch._check_on_all_ranks

    def checked(trainer, model):
        models = trainer._models()
        if sum(weight.numel() for one in models for weight in one.parameters()) > MOST_WEIGHTS:
            return check(trainer, model)
        key = (
            type(trainer).__name__, trainer.accelerator.mixed_precision, trainer._share_prompt,
            *map(described, models), *(one.training for one in models),
        )  # fmt: skip
        if key not in FOUND:
            FOUND[key] = check(trainer, model)
        return FOUND[key]

    monkeypatch.setattr(PackingSwitch, "_check_on_all_ranks", checked)
