"""Sequence parallelism: a flat row whose tokens are distributed over the processes of a group.

Each process forwards its part of the row. Before attention an all-to-all turns parts of the row with all heads into
the whole row with some heads; another all-to-all turns the outputs back (Ulysses, arXiv:2309.14509).

If the heads do not divide by all processes (28 heads, 8 processes), the processes form several lines: each line
divides the heads, and attends with the queries of some parts of the row to all its keys (context parallelism,
arXiv:2407.21783, section 3.3.2). Every line gets a copy of the keys, which are few compared with the queries, where a
ring would pass them from line to line; their gradients are summed on the way back.

Legend: S processes of a group, U = gcd(S, H) of a line, R = S / U lines, T tokens of the row padded to a multiple of
S, H query heads, Hkv key heads, D head size.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Neighbouring processes that share each row: their number S, this process's rank, torch.distributed's group."""

    size: int
    rank: int
    processes: Any = None

    @classmethod
    def of_world(cls, size: int, timeout_s: float) -> "SequenceGroup":
        """Divide all processes into groups of `size` neighbours and return this process's group. Collective.

        The group's collectives wait at most `timeout_s` seconds for a process.

        Raises:
            ValueError: The number of processes is not a multiple of `size`.
        """
        processes, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))
        return cls(size, dist.get_rank(processes), processes)

    def slice_of(self, num_tokens: int) -> slice:
        """Return the place of this process's tokens in a row of `num_tokens`, padded to a multiple of the size."""
        each = -(-num_tokens // self.size)
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather_object(self, value: Any) -> list[Any]:
        """Return the value of each process of the group. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.processes)
        return values

    def lines(self, num_heads: int) -> list[list[int]]:
        """Return for each line the parts of the row whose queries it has, for a model with `num_heads` query heads.

        Parts are dealt to lines back and forth (0 1 1 0 0 1 1 0), so that each line has early queries, which see few
        keys, and late queries. Ranks 0 to U - 1 are the first line.
        """
        length = gcd(self.size, num_heads)
        lines: list[list[int]] = [[] for _ in range(self.size // length)]
        for turn in range(length):
            parts = range(turn * len(lines), (turn + 1) * len(lines))
            for line, part in zip(lines, reversed(parts) if turn % 2 else parts, strict=True):
                line.append(part)
        return lines


def queries_to_heads(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Turn a part of the row with all heads, [1, H, T / S, D], into the line's parts with some, [1, H / U, T / R, D].

    Differentiable, and collective in the backward too.
    """
    routes = _routes(group, x.shape[1])
    blocks = x[0].unflatten(0, (sum(routes.to), -1))
    parts = _AllToAll.apply(blocks, group, routes.to, routes.back)  # [U, H / U, T / S, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def keys_to_heads(x: torch.Tensor, group: SequenceGroup, num_heads: int) -> torch.Tensor:
    """Turn a part of the row with all key heads, [1, Hkv, T / S, D], into the row with some, [1, heads, T, D].

    Differentiable, and collective in the backward too. Key heads that do not divide are repeated, only as often as
    each process needs for its query heads, `num_heads` in all.
    """
    length = gcd(group.size, num_heads)
    x = x[0].repeat_interleave(length // gcd(x.shape[1], length), dim=0).unflatten(0, (length, -1))
    for_every_line = x.expand(group.size // length, *x.shape).flatten(0, 1)
    each = [1] * group.size
    parts = _AllToAll.apply(for_every_line, group, each, each)  # [S, heads, T / S, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def heads_to_tokens(x: torch.Tensor, group: SequenceGroup, num_heads: int) -> torch.Tensor:
    """Turn the line's parts with some heads, [1, T / R, H / U, D], into a part with all heads, [1, T / S, H, D].

    Differentiable, and collective in the backward too.
    """
    routes = _routes(group, num_heads)
    blocks = x[0].unflatten(0, (sum(routes.back), -1))
    parts = _AllToAll.apply(blocks, group, routes.back, routes.to)  # [U, T / S, H / U, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


class Routes(NamedTuple):
    """The number of blocks of queries, 1 or 0, that this process exchanges with each process of the group."""

    to: list[int]  # sent with this process's part of the row, as many outputs come back
    back: list[int]  # received of the processes' parts of the row, as many outputs are sent back


def _routes(group: SequenceGroup, num_heads: int) -> Routes:
    """Return the routes of a model with `num_heads` query heads, in which each line attends with its own queries."""
    lines = group.lines(num_heads)
    own = lines[group.rank // len(lines[0])]
    return Routes(
        to=[int(group.rank in line) for line in lines for _ in line],
        back=[int(part in own) for part in range(group.size)],
    )


def sum_over(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum of the processes' tensors, on all of them. Collective in the forward only.

    Each process's tensor has the numbers of its tokens, and zeros elsewhere. All processes compute the same loss from
    the sum, so the gradient of a process's numbers is its loss's gradient: the backward returns it unchanged.
    """
    return _Sum.apply(x, group)


class _AllToAll(torch.autograd.Function):
    """Send `send[i]` of the blocks `x` to process i, and return the received blocks in process order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup, send: list[int], receive: list[int]) -> torch.Tensor:
        """Overrides torch.autograd.Function.forward.

        Args:
            x: [blocks, ...] to send, in the order of their receivers.
            group: The processes that exchange.
            send, receive: Number of blocks to and from each process of the group.
        """
        ctx.way_back = group, receive, send
        received = torch.empty((sum(receive), *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(received, x.contiguous(), receive, send, group=group.processes)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grads[0], *ctx.way_back), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group.processes)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
