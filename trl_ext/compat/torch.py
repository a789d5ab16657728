"""PyTorch's attention kernels for rows of different lengths and on the CPU, and flash-attn's."""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from trl_ext.errors import SupportError


def has_varlen_attn(device: torch.device) -> bool:
    """Return True if PyTorch's varlen kernel runs: on Ampere cards and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def capability_of(device: torch.device) -> int:
    """Return the major compute capability of a card, 9 for Hopper and 10 for Blackwell; 0 if NVIDIA made none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.cuda else 0


@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def call_varlen_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_left: int,
) -> torch.Tensor:
    """Call `varlen_attn`, causal with the lower-right corner aligned, with the installed signature.

    Args:
        q: [T, H, D]; k, v: [K, Hkv, D].
        window_left: Keys before itself that a query sees; -1 for all.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (window_left, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _varlen_parameters():
            options["enable_gqa"] = True
        else:
            # Issue: torch 2.11's varlen_attn wants as many key heads as query heads.
            # Fixed in: torch 2.12.
            # Remove when: torch>=2.12 is the lower bound.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)
    assert isinstance(out, torch.Tensor)  # a pair only when more than the output is asked for
    return out


@cache
def flash_attn_function(version: int) -> Callable[..., Any]:
    """Return `flash_attn_varlen_func` of the installed flash-attn 2 or 3; raise SupportError if there is none."""
    module = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    try:
        return import_module(module).flash_attn_varlen_func
    except ImportError as error:
        raise SupportError(
            f"attn_implementation='flash_attention_{version}' needs the package {module}, which is not installed. "
            "Leave attn_implementation unset: PyTorch's own kernel packs as well."
        ) from error


@cache
def cpu_attention_shares_keys() -> bool:
    """Return True if PyTorch's flash-attention on the CPU takes fewer key heads than query heads.

    Other versions would read beyond the keys, so the keys that PyTorch saves for the kernel are inspected.
    """
    # A checkpointed layer counts the tensors that are saved in it, by a hook that these replace.
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), unhooked:
        q, k = (torch.zeros(1, heads, 4, 16, requires_grad=True) for heads in (2, 1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        saved = getattr(out.grad_fn, "_saved_key", None)
    return saved is not None and saved.shape[1] == 1


def computes_below_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if matrix products round as half precision does: half types, and float32 with TF32 on a card."""
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return dtype != torch.float32 or is_tf32
