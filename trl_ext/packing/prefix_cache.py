"""Keys and values of a prefix that goes through the model once, for several forwards after it.

Each of these forwards uses the keys and values as leaves and has its own backward, which leaves gradients there. Then
the prefix goes backward from the end of its graph, and at each layer the gradients of that layer's leaves are added.
Every backward, including the prefix's, brings one gradient to every weight, layer by layer, as engines (DDP,
DeepSpeed) expect.

Legend: T tokens of the prefix, Hkv key heads, D head size.
"""

from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class PrefixCache:
    """Keys and values, [1, Hkv, T, D] each, of all attention layers.

    `num_tokens` is T; 0 for a process without a prefix, which makes the same calls as the others.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._end: torch.Tensor | None = None
        self._goes_backward = False
        self._leaves: dict[torch.nn.Module, Pair] = {}

    @property
    def is_filled(self) -> bool:
        """Whether the prefix has gone through the model."""
        return self._end is not None

    def end(self, output: torch.Tensor) -> None:
        """Store the end of the prefix's forward: `output` of any shape, with the graph of all layers."""
        self._end = output.sum()

    def loss(self) -> torch.Tensor:
        """Return 0, whose backward takes the gradients of the later forwards through the prefix.

        No further forward may use the cache: only the graph holds the keys and values, and frees them on its way.
        """
        assert self._end is not None, "The prefix has gone through the model."
        loss = 0.0 * self._end
        self.clear()
        self._goes_backward = True
        return loss

    def clear(self) -> None:
        """Free everything, so that the prefix may go through the model again."""
        self._end, self._goes_backward = None, False
        self._leaves.clear()

    def store(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Store a layer's keys and values of the prefix; a dummy image token may follow it.

        A recompute under gradient checkpointing, within the backward, changes nothing.

        Returns:
            Keys and values for the layer's attention; the gradients of the leaves are added to theirs.
        """
        if self._goes_backward:
            return key, value
        num = self.num_tokens or None
        of_key, of_value = (x[:, :, :num].detach().requires_grad_(x.requires_grad) for x in (key, value))
        self._leaves[layer] = of_key, of_value
        return _Joined.apply(key, of_key), _Joined.apply(value, of_value)

    def before(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Return the prefix's keys and values, followed by a later forward's."""
        of_prefix = self._leaves[layer]
        return torch.cat([of_prefix[0], key], dim=2), torch.cat([of_prefix[1], value], dim=2)


class _Joined(torch.autograd.Function):
    """A tensor whose gradient includes the gradient of a leaf of its first tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), gathered = grads, ctx.leaf.grad
        ctx.leaf.grad, ctx.leaf = None, None
        if gathered is not None:
            gradient = gradient.clone()
            gradient[:, :, : gathered.size(2)] += gathered
        return gradient, None
