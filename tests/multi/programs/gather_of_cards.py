"""What a test runs first in each process, so that two processes over gloo gather as accelerate does on cards.

accelerate's `gather` has two branches: a list of tensors for gloo, one flat tensor for every other backend. Here its
own code takes the second one. What NCCL would refuse or mix up is refused, too: dtypes that it has not, and shapes
that differ between processes, for which accelerate's debug mode looks.
"""

import os
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import operations

# torch/csrc/distributed/c10d/NCCLUtils.cpp, but for those of 8 bits in floating point.
DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}

os.environ["ACCELERATE_DEBUG_MODE"] = "1"
plain_gather, plain_into_tensor = operations._gpu_gather, torch.distributed.all_gather_into_tensor


def gather(tensor):
    """Run accelerate's own `_gpu_gather`, which asks for the name of the backend."""
    with (
        patch.dict(PartialState._shared_state, backend="nccl"),
        patch.object(torch.distributed, "all_gather_into_tensor", into_tensor),
    ):
        return plain_gather(tensor)


def into_tensor(output, tensor):
    """As NCCL, which counts elements where gloo compares shapes."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"NCCL has no {tensor.dtype}.")
    if tensor.numel():  # gloo refuses tensors of no elements
        plain_into_tensor(output, tensor.view(-1))


operations._gpu_gather = gather
