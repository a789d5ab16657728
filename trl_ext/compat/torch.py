"""PyTorch's attention kernels for rows of different lengths, and flash-attn's."""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from trl_ext.errors import SupportError


def has_varlen_attn(device: torch.device) -> bool:
    """Return True where PyTorch's varlen kernel runs: Ampere cards and later, and a signature that takes a scale."""
    # torch 2.10 had the kernel without a scale.
    return "scale" in _varlen_parameters() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
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
    """Call `varlen_attn`, causal with the lower-right corner aligned, under the signature that is installed.

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


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel below `varlen_attn`; return its output [T, H, D] and log-sum-exp [H, T].

    `varlen_attn` hands out the log-sum-exp, too, but its backward would not take another one in.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, is_causal, False, scale=scale, **_sight(is_causal)
    )
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, for an output and a log-sum-exp that may be those of more keys than k."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    unused = torch.empty(0, device=q.device)
    lengths = (cu_q, cu_k, max_q, max_k)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, is_causal, random_state, unused, scale=scale, **_sight(is_causal)
    )
    return dq, dk, dv


def _sight(is_causal: bool) -> dict[str, int]:
    return {"window_size_left": -1, "window_size_right": 0 if is_causal else -1}


def cpu_flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [B, H, T, D] and log-sum-exp [B, H, T] of PyTorch's CPU kernel. All have H heads."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def cpu_flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, for an output and a log-sum-exp that may be those of more keys than k."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return dq, dk, dv


@cache
def flash_attn_function(version: int) -> Callable[..., Any]:
    """Return `flash_attn_varlen_func` of the installed flash-attn 2 or 3.

    Raises:
        SupportError: it is not installed.
    """
    module = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    try:
        return import_module(module).flash_attn_varlen_func
    except ImportError as error:
        raise SupportError(
            f"attn_implementation='flash_attention_{version}' needs the package {module}, which is not installed. "
            "Leave attn_implementation unset: PyTorch's own kernel packs as well."
        ) from error
