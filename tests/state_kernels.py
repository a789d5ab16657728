"""Stand-ins on the CPU for the kernels of layers with state: the packages' names and arguments, one token at a time.

Legend: B rows, T tokens, H heads, D head size, N state size, G groups, C channels.
"""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

# What transformers' model files call each kernel.
_NAMES = {
    "causal_conv1d_fn": ("causal_conv1d_fn", "causal_conv1d"),
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", "fla"),
    "mamba2_chunk_scan": ("mamba_chunk_scan_combined", "mamba_ssm"),
    "mamba2_split_conv1d_scan_combined": ("mamba_split_conv1d_scan_combined", "mamba_ssm"),
}


def install(monkeypatch: Any, modeling: ModuleType, *without: str) -> None:
    """Let a model file of transformers find the packages, as it does when it is imported.

    Args:
        modeling: The file, such as `transformers.models.bamba.modeling_bamba`.
        without: Packages that stay absent.
    """
    scan = SimpleNamespace(
        mamba_chunk_scan_combined=mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined,
    )
    rules = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    packages = {
        "causal_conv1d": SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn),
        "fla": SimpleNamespace(ops=SimpleNamespace(gated_delta_rule=rules)),
        "mamba_ssm": SimpleNamespace(ops=SimpleNamespace(triton=SimpleNamespace(ssd_combined=scan))),
    }
    with monkeypatch.context() as importing:
        for name, module in packages.items():
            if name not in without:
                importing.setitem(sys.modules, name, module)
        for name, (kernel, package) in _NAMES.items():
            if hasattr(modeling, name):
                found = use_kernel_func_from_hub_with_fallback(kernel, package)
                monkeypatch.setattr(modeling, name, found(inspect.unwrap(getattr(modeling, name))))


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """x: [B, C, T]; weight: [C, width]; a tap reads nothing of another sequence."""
    num_tokens, width = x.shape[-1], weight.shape[-1]
    out = torch.zeros_like(x) if bias is None else bias[None, :, None].expand_as(x)
    for back in range(min(width, num_tokens)):
        tap = F.pad(x, (back, 0))[..., :num_tokens]
        if seq_idx is not None:
            before = F.pad(seq_idx, (back, 0), value=-1)[:, :num_tokens]
            tap = tap * (before == seq_idx)[:, None]
        out = out + tap * weight[:, width - 1 - back, None]
    return F.silu(out) if activation else out


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    """q, k: [B, T, Hk, D]; v: [B, T, H, D]; g, beta: [B, T, H]; states: [B, H, D, D], or one a sequence."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    starts = [0] if cu_seqlens is None else cu_seqlens.tolist()[:-1]
    out, finals, state = [], [], None
    for t in range(q.shape[1]):
        if t in starts:
            finals += [state] if t else []
            state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
            if initial_state is not None:
                state = initial_state if cu_seqlens is None else initial_state[starts.index(t), None]
        state = state * g[:, t].exp()[..., None, None]
        seen = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * ((v[:, t] - seen) * beta[:, t, :, None])[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2) * (scale or q.shape[-1] ** -0.5))
    return torch.stack(out, dim=1), torch.cat([*finals, state]) if output_final_state else None


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """x: [B, T, H, D]; dt: [B, T, H]; A, D: [H]; B, C: [B, T, G, N]."""
    assert z is None and cu_seqlens is None
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (one.repeat_interleave(x.shape[2] // one.shape[2], dim=2) for one in (B, C))
    out = []
    for t in range(x.shape[1]):
        if t == 0 or (seq_idx is not None and seq_idx[0, t] != seq_idx[0, t - 1]):
            assert t == 0 or initial_states is None  # the package's kernel begins anew there
            state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states
        step = dt[:, t, :, None, None]
        state = state * (step * A[:, None, None]).exp() + step * x[:, t, ..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + (0 if D is None else D[:, None] * x[:, t]))
    return (torch.stack(out, dim=1), state) if return_final_states else torch.stack(out, dim=1)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    """zxbcdt: [B, T, all that the input projection gives]."""
    assert not norm_before_gate and not return_final_states
    inner, num_heads = D.shape[0] * headdim, D.shape[0]
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], num_heads], dim=-1)
    xbc = causal_conv1d_fn(xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = xbc.tensor_split((inner, inner + (xbc.shape[-1] - inner) // 2), dim=-1)
    x, B, C = x.unflatten(-1, (num_heads, headdim)), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    options = {"dt_bias": dt_bias, "seq_idx": seq_idx, "dt_softplus": True, "dt_limit": dt_limit}
    out = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, **options).flatten(2) * F.silu(z)
    if rmsnorm_weight is not None:
        grouped = out.unflatten(-1, (ngroups, -1))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + rmsnorm_eps)
        out = (grouped * scale).flatten(2) * rmsnorm_weight
    return F.linear(out, outproj_weight, outproj_bias)
