"""A model whose forward runs out of memory above a size, for tests on machines where memory does not run out."""

from typing import Any

import torch

SENTENCE = "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 44.42 GiB"


class Limit:
    """Raises what CUDA's allocator would, in every forward with gradient of more than `tokens` tokens.

    Args:
        model: Unwrapped.
        tokens: Padding included.
        times: How often it raises, at most.
        at: Which forwards with gradient it raises in, counted from 0; None for any.

    Attributes:
        seen: Tokens of every forward with gradient, failed ones included.
        failed: How many failed.
    """

    def __init__(
        self, model: torch.nn.Module, tokens: float = 0, times: float = float("inf"), at: set[int] | None = None
    ):
        self.tokens = tokens
        self.times = times
        self.at = at
        self.seen: list[int] = []
        self.failed = 0
        # Within the model's own forward, where allocators are asked; after some of its graph is there.
        model.get_input_embeddings().register_forward_hook(self._check)

    def _check(self, module: Any, args: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        self.seen.append(args[0].numel())
        is_due = self.at is None or len(self.seen) - 1 in self.at
        if is_due and args[0].numel() > self.tokens and self.failed < self.times:
            self.failed += 1
            raise torch.OutOfMemoryError(SENTENCE)


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError(SENTENCE)


def fail_in_backward(model: torch.nn.Module) -> None:
    """The backward of every forward with gradient runs out of memory."""

    def through(module: Any, args: Any, output: torch.Tensor) -> Any:
        return FailsInBackward.apply(output) if output.requires_grad else None

    model.get_input_embeddings().register_forward_hook(through)
