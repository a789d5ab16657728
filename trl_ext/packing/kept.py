"""Keys and values of a prefix that goes through the model once, for several forwards behind it.

Each of these forwards takes the keys and values as they are, and leaves their gradients. The last one is joined to the
graph of the prefix, and its backward carries all gradients on into it: one backward of the prefix, within that of a
forward which meets all weights, so that engines (DDP, DeepSpeed) see each weight once.

Legend: T tokens of the prefix, Hkv key heads, D head size.
"""

from typing import Any

import numpy as np
import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class KeptKeys:
    """Keys and values, [1, Hkv, T, D] each, of all attention layers.

    Args:
        num_tokens: T; 0 for a process without such a prefix, which goes through the same calls as the others.

    Attributes:
        tokens: The prefix, known from the first forward on.
        is_last: Whether the running forward is the last behind the prefix.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.tokens: np.ndarray | None = None
        self.is_last = False
        self._end: torch.Tensor | None = None
        self._of_layers: dict[torch.nn.Module, Pair] = {}
        self._leaves: dict[torch.nn.Module, Pair] = {}

    @property
    def is_there(self) -> bool:
        """Whether the prefix has gone through the model."""
        return self._end is not None

    def end(self, output: torch.Tensor) -> None:
        """Note that the prefix has gone through the model.

        Args:
            output: What came out, of any shape. It stays in the graph, so that a backward meets all layers.
        """
        self._end = output.sum()

    def forget(self) -> None:
        """Let go of everything: the backward is done, or the prefix's forward did not end and comes again."""
        self._end = None
        self._of_layers.clear()
        self._leaves.clear()

    def keep(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep those of a layer, of the prefix alone: a token that only calls the vision tower may stand behind it.

        A recompute under gradient checkpointing comes a second time, and changes nothing.
        """
        num = self.num_tokens or None
        self._of_layers.setdefault(layer, (key[:, :, :num], value[:, :, :num]))

    def before(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Return keys and values of the prefix with those of a forward behind it."""
        kept = self._joined(layer) if self.is_last else self._leaves_of(layer)
        return torch.cat([kept[0], key], dim=2), torch.cat([kept[1], value], dim=2)

    def rest(self, is_behind: bool) -> torch.Tensor:
        """Return 0 with the graph of the prefix, for the loss of the last forward.

        Args:
            is_behind: Whether that forward took the keys and values, and with them their part of the graph.
        """
        assert self._end is not None
        rest = 0.0 * self._end
        for layer in () if is_behind else self._of_layers:
            rest = rest + 0.0 * sum(one.sum() for one in self._joined(layer))
        return rest

    def _leaves_of(self, layer: torch.nn.Module) -> Pair:
        if layer not in self._leaves:
            key, value = (one.detach().requires_grad_(one.requires_grad) for one in self._of_layers[layer])
            self._leaves[layer] = key, value
        return self._leaves[layer]

    def _joined(self, layer: torch.nn.Module) -> Pair:
        key, value = (
            _Joined.apply(one, leaf) for one, leaf in zip(self._of_layers[layer], self._leaves_of(layer), strict=True)
        )
        return key, value


class _Joined(torch.autograd.Function):
    """A tensor, to whose gradient the one that a leaf has gathered is added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gathered, ctx.leaf = ctx.leaf.grad, None
        return grads[0] if gathered is None else grads[0] + gathered, None
