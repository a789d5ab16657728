"""Whether merged attention gives the right numbers on this machine, asked once before it is used.

It rests on functions of PyTorch that are not documented, and on a backward that takes another call's output. So a
small row goes through it, forward and backward, beside attention written out.

Legend: T tokens of the row, H query heads, Hkv key heads, D head size.
"""

from functools import cache

import numpy as np
import torch
from transformers.utils import logging

from trl_ext.packing.merge import Kernel, backward, forward
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable

logger = logging.get_logger(__name__)

# Relative error that rounding explains. A prefix that is missed costs more than half.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 3e-2


@torch.compiler.disable
@cache
def is_exact(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True where merged attention agrees with attention written out; warn where it does not."""
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            error = _error(kernel, device, dtype, head_size)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as failure:
        # Whatever another version of PyTorch makes of the call means the same.
        reason = f"{type(failure).__name__}: {failure}".partition("\n")[0].removesuffix(".")
    else:
        if error <= (_HALF_TOLERANCE if dtype in (torch.bfloat16, torch.float16) else _TOLERANCE):
            return True
        reason = f"a relative error of {error:.1e}"
    logger.warning(
        f"Attention that keeps the keys of a shared prompt once is not used on {device} in {dtype}: {reason}. Keys "
        "are copied instead, which takes more memory and gives the same numbers."
    )
    return False


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> float:
    """Return the largest relative error of output and gradients, on a row with prefixes of prefixes."""
    beginnings = {0: [*range(40)], 1: [*range(21), 3, 4], 2: [*range(21), *range(9)]}
    items = [RowSize(group, len(tokens), own) for group, tokens in beginnings.items() for own in (3, 9, 1)]
    (row,) = plan_rows(items, None, {group: np.array(tokens) for group, tokens in beginnings.items()})
    table = SegmentTable(row.segments, device)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(row.num_tokens, heads, head_size, generator=draw) for heads in (4, 2, 2, 4))
    q, k, v, grad = (x.to(device, dtype) for x in (q, k, v, grad))
    scale = head_size**-0.5
    out, lse = forward(q, k, v, table.parts, kernel, scale)
    ours = out, *backward(grad, q, k, v, out, lse, table.parts, kernel, scale)
    reference = _written_out(q.float(), k.float(), v.float(), grad.float(), table, scale)
    errors = [(one.float() - other).norm() / other.norm() for one, other in zip(ours, reference, strict=True)]
    return torch.stack(errors).max().item()


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, table: SegmentTable, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output of attention and the gradients of q, k and v, by a mask over all pairs of tokens."""
    sees = torch.zeros(len(q), len(q), dtype=torch.bool, device=q.device)
    for segment, chain in zip(table.segments, table.chains, strict=True):
        for prefix in (table.segments[number] for number in chain[:-1]):
            sees[segment.start : segment.end, prefix.start : prefix.end] = True
        own = slice(segment.start, segment.end)
        sees[own, own] = torch.ones_like(sees[own, own]).tril()
    rep = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(rep, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", p, v)
    dp = torch.einsum("qhd,khd->hqk", grad, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    dk, dv = (x.unflatten(1, (-1, rep)).sum(2) for x in (dk, dv))
    return out, torch.einsum("hqk,khd->qhd", ds, k), dk, dv
