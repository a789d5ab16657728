"""A stand-in for flash-attention on the CPU: the arguments of `flash_attn`, computed by matrix products."""

from functools import partial
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as utils

from trl_ext.compat.transformers import flash_varlen_function
from trl_ext.packing import attention, kernels


class FlashAttention:
    """Takes the place of the package for every implementation with "flash" in its name.

    Attributes:
        num_packed: Calls by our kernel.
    """

    def __init__(self, monkeypatch: Any):
        self.num_packed = 0
        # What transformers has loaded is remembered in its module, and restored with it.
        loaded = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn")
        for name in (*loaded, "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
            monkeypatch.setattr(utils, name, None, raising=False)
        functions = (flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input)
        monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: functions)
        monkeypatch.setattr(attention, "choose_kernel", self._choose)
        # A name that only the stand-in serves would be loaded in every later packed forward of the process.
        monkeypatch.setattr(attention, "_dispatched", set(attention._dispatched))
        flash_varlen_function.cache_clear()

    def _choose(self, base: str, *_: Any, **__: Any) -> Any:
        """As on a card in half precision; here in float32, so that 1e-6 can be asked for."""
        assert "flash" in base
        self.num_packed += 1
        return partial(kernels.flash_attention, base=base)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """q: [B, T, H, D]; k, v: [B, K, Hkv, D]."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    # The last query stands beside the last key.
    behind = torch.arange(num_keys)[None] - torch.arange(num_queries)[:, None] - (num_keys - num_queries)
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden |= behind > 0
    if window_size[0] >= 0:
        hidden |= behind < -window_size[0]
    return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1),
):  # fmt: skip
    """q: [T, H, D]; k, v: [K, Hkv, D]; sequence after sequence."""
    options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    lengths = [cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
    parts = zip(*(x.split(n) for x, n in zip((q, k, v), lengths, strict=True)), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in part), **options)[0] for part in parts])
