"""Apple's GPUs have no float64: sums that need its digits are made elsewhere, or of integers."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_ext.trainers.ppo.objective.equations import generalized_advantages, whiten
from trl_ext.trainers.step.settings import StepCounts

torch.set_num_threads(1)


class NoFloat64(TorchDispatchMode):
    """Raises what an Apple GPU raises when a float64 tensor comes to be on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "mps" and x.dtype == torch.float64:
                raise TypeError("no float64 on MPS")
        return result


@contextmanager
def apple_gpu() -> Iterator[torch.device]:
    """Tensors on an Apple GPU that has no memory and computes nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True), NoFloat64():
        yield torch.device("mps", 0)


def test_the_device_of_these_tests_has_no_float64():
    with apple_gpu() as device, pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=device).double()


def test_ppos_targets_are_made_on_a_device_without_float64():
    with apple_gpu() as device:
        x, mask = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device, dtype=torch.long)
        results = [
            *generalized_advantages(x, x, mask, 0.9, 0.9),
            whiten(x, mask),
            whiten(x, mask, shift_mean=False),
        ]
    assert {result.device.type for result in results} == {"mps"}
    assert {result.dtype for result in results} == {torch.float32}


def test_tokens_are_counted_exactly_on_a_device_without_float64():
    sent = []

    def reduce(local: torch.Tensor, reduction: str) -> torch.Tensor:
        sent.append((local.device.type, local.dtype))
        return total

    total = torch.tensor([2**25 + 1, 2**25 + 1, 2**26 + 2])  # float32 would round the first two
    counts = StepCounts()
    counts.add(1, 2, 3)
    with apple_gpu() as device:
        metrics = counts.take_tokens(SimpleNamespace(device=device, reduce=reduce))
    assert sent == [("mps", torch.int64)]
    assert metrics["packing/forwarded_tokens"] == 2**25 + 1
    assert metrics["packing/padded_over_forwarded"] == 2.0
