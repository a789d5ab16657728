"""The packages' own Triton kernels for layers with state, in Triton's interpreter: packed as each row alone.

`make state-kernels` installs the packages without what they compile for a card: causal-conv1d, which is all of it, is
the stand-in of `tests/state_kernels.py`.
"""

import contextlib
import importlib
import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tests import state_kernels, tiny
from tests.batches import RAGGED, alone, gradient
from tests.train.trainers.grpo.test_grpo_exactness import GRADIENT_TOLERANCE, LOGP_TOLERANCE, trainer

autotuner = pytest.importorskip("triton.runtime.autotuner", reason="make state-kernels installs Triton")


class Number(int):
    """A counter of a kernel's loop, which the interpreter leaves a plain integer."""

    def to(self, dtype):
        return self


def convolution() -> ModuleType:
    """The package causal-conv1d, with what mamba-ssm's fused kernel calls."""

    def forward(x, weight, bias, seq_idx, initial_states, final_states, silu):
        return state_kernels.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu" if silu else None)

    def backward(x, weight, bias, grad, seq_idx, initial_states, grad_final, grad_x, returns_grad_states, silu):
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in (x, weight, bias)]
            gradients = torch.autograd.grad(forward(*inputs, seq_idx, None, None, silu), inputs, grad)
        if grad_x is not None:
            grad_x.copy_(gradients[0])
        return *gradients, None

    package = ModuleType("causal_conv1d")
    package.causal_conv1d_fn = state_kernels.causal_conv1d_fn
    package.cpp_functions = ModuleType("causal_conv1d.cpp_functions")
    package.cpp_functions.causal_conv1d_fwd_function = forward
    package.cpp_functions.causal_conv1d_bwd_function = backward
    package.cpp_functions.causal_conv1d_update_function = None
    return package


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The packages, which ask for a card where they are imported or tune themselves."""
    package = convolution()
    mamba = ModuleType("mamba_ssm")  # its own first file imports what is compiled
    mamba.__path__ = [f"{folder}/mamba_ssm" for folder in sys.path]
    for name, module in {
        "causal_conv1d": package,
        "causal_conv1d.cpp_functions": package.cpp_functions,
        "mamba_ssm": mamba,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *_, **__: [1.0, 1.0, 1.0])
    states = importlib.import_module("fla.ops.common.chunk_delta_h")
    monkeypatch.setattr(states, "range", lambda *ends: map(Number, range(*ends)), raising=False)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize(
    ("family", "package", "changes"),
    [
        ("qwen3_5", "fla", {"layer_types": ["linear_attention", "full_attention"]}),
        ("bamba", "mamba_ssm", {"attn_layer_indices": [1], "mamba_d_state": 16}),
    ],
)
def test_packed_rows_score_as_each_row_alone(family, package, changes, share_prompt, tmp_path, monkeypatch):
    changes = {**changes, "num_hidden_layers": 2}
    reference = tiny.model(family, **changes).eval()  # without kernels
    expected, _ = alone(reference, RAGGED)
    weights = RAGGED.weights()
    theirs = gradient(reference, (expected * weights).sum())
    modeling = importlib.import_module(type(reference).__module__)
    state_kernels.install(monkeypatch, modeling, "fla", "mamba_ssm")  # of the stand-ins
    kernel = getattr(modeling, "torch_chunk_gated_delta_rule", None) or modeling.mamba2_chunk_scan
    assert inspect.getclosurevars(kernel).nonlocals["implementation"].__module__.startswith(package)
    subject = trainer(tiny.model(family, **changes), tmp_path, share_prompt=share_prompt)
    assert subject.step_settings.share_prompt is share_prompt
    subject.model.train()  # the self-check has taken the kernels of evaluation, too
    logps, _, _ = subject._get_per_token_logps_and_entropies(
        subject.model, RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width
    )
    ours = gradient(subject.model, (logps * weights).sum())
    assert (logps - expected).abs().max() <= LOGP_TOLERANCE
    assert (ours - theirs).norm() / theirs.norm() <= GRADIENT_TOLERANCE
