"""Sequence parallelism: a flat row whose tokens are spread over the processes of a group (Ulysses, arXiv:2309.14509).

Each process forwards its part of the row. Before attention one all-to-all turns parts of the row with all heads into
the whole row with some heads; another one turns the outputs back. So kernels see whole rows and know nothing of it.

Legend: S processes of a group, T tokens of the row padded to a multiple of S, H query heads, Hkv key heads, D head
size.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from trl_ext.errors import PackingError


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Neighbouring processes that share each row.

    Args:
        size: S.
        rank: Of this process in the group.
        processes: The group of torch.distributed.
    """

    size: int
    rank: int
    processes: Any = None

    @classmethod
    def of_world(cls, size: int, timeout_s: float) -> "SequenceGroup":
        """Cut all processes into groups of `size` neighbours and return this one's. Collective.

        Args:
            size: S.
            timeout_s: For which the group's collectives wait for a process that does not come.

        Raises:
            ValueError: the number of processes is no multiple of `size`.
        """
        processes, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))
        return cls(size, dist.get_rank(processes), processes)

    def slice_of(self, num_tokens: int) -> slice:
        """Return where this process's tokens lie in a row of so many, which is padded to a multiple of the size."""
        each = -(-num_tokens // self.size)
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather_object(self, value: Any) -> list[Any]:
        """Return the value of each process of the group. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.processes)
        return values

    def check_heads(self, num_heads: int) -> None:
        """Raise PackingError unless every process gets equally many query heads."""
        if num_heads % self.size:
            raise PackingError(
                f"{num_heads} attention heads cannot be dealt to sequence_parallel={self.size} processes. Set it to a "
                f"divisor of {num_heads}."
            )


def tokens_to_heads(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Turn a part of the row with all heads, [1, heads, T / S, D], into the row with some heads, [1, heads / S, T, D].

    Differentiable and collective, in the backward as well. Key heads that do not divide are repeated: as few as each
    process needs for its own query heads.
    """
    missing = group.size // gcd(x.shape[1], group.size)
    x = x.repeat_interleave(missing, dim=1) if missing > 1 else x
    parts = _exchange(x[0].unflatten(0, (group.size, -1)), group)  # [S, heads / S, T / S, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def heads_to_tokens(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Turn the row with some heads, [1, T, H / S, D], into a part of it with all heads, [1, T / S, H, D].

    Differentiable and collective, in the backward as well.
    """
    parts = _exchange(x[0].unflatten(0, (group.size, -1)), group)  # [S, T / S, H / S, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def sum_over(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum of the processes' tensors, on all of them. Collective in the forward only.

    For numbers of which each process has those of its own tokens, and zeros elsewhere. All processes make the same
    loss of the sum, so the gradient of a process's own numbers is what its loss says: the backward hands it through.
    """
    return _Sum.apply(x, group)


def _exchange(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Send `x[i]` to process i and return what the processes sent, by process."""
    return _AllToAll.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(received, x.contiguous(), group=group.processes)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group.processes)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
