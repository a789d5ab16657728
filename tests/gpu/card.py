"""Where the tests of this folder run: on a CUDA card, and elsewhere if TRL_EXT_TEST_DEVICE says so.

`TRL_EXT_TEST_DEVICE=cpu pytest tests/gpu` shows on any machine that they run; what they say of kernels, only a card
can tell.
"""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("TRL_EXT_TEST_DEVICE", "cuda"))
ON_CARD = DEVICE.type == "cuda"
# In half precision a card has kernels that a processor lacks.
needs_card = pytest.mark.skipif(not ON_CARD, reason="needs a CUDA card")
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CARD and not torch.cuda.is_available(), reason="needs a CUDA card"),
]
