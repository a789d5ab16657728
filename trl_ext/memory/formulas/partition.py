"""Which weights lie in rank 0's share of ZeRO-1 and 2: it splits the flattened list of them, not each of them.

A weight that a share cuts is kept whole in the share's gradient buffer (`copy_grads_in_partition` of DeepSpeed's
stage_1_and_2.py sizes it by whole parameters), and a share's gradients are cast to fp64 one by one for their norm
(`get_grad_norm_direct`). Both are largest where the embedding table lies, which comes first: rank 0. Norms and biases
are a list of their own, too short to matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from trl_ext.memory.models.shapes import (
    ModelShape,
    attention_linears,
    embedding_params,
    head_params,
    mlp_linears,
    num_dense_layers,
    shared_linears,
)


@dataclass(frozen=True, slots=True)
class Share:
    """Rank 0's, in elements.

    Args:
        num: Its part of the list.
        touched: Of all weights that it holds or cuts, whole.
        largest: Of the largest piece of one weight in it.
        num_pieces: Weights that it holds or cuts.
    """

    num: float
    touched: float
    largest: float
    num_pieces: int


@lru_cache(maxsize=256)
def first_share(shape: ModelShape, num_params: int, num_gpus: int, has_head: bool) -> Share:
    """Rank 0's share of a model trained with all its weights.

    Llama-3-8B over 8: 1,003.8 M of the list, of which the table is 525.3 M; with the last weight that it cuts, whole,
    it touches 1,039.7 M.

    Args:
        shape: The model.
        num_params: All that is trained.
        num_gpus: Ranks.
        has_head: It ends with a language model's head.
    """
    whole = num_params / num_gpus
    left, touched, largest, num_pieces = whole, 0.0, 0.0, 0
    for weight in weights_in_order(shape, has_head):
        if left <= 0:
            break
        largest = max(largest, min(weight, left))
        touched, left, num_pieces = touched + weight, left - weight, num_pieces + 1
    return Share(whole, max(touched, whole), largest, num_pieces)


def weights_in_order(shape: ModelShape, has_head: bool) -> Iterator[int]:
    """Elements of each weight, as `model.parameters()` lists them; no norms and biases."""
    yield embedding_params(shape)
    for layer in range(shape.num_layers):
        yield from (linear.fan_in * linear.fan_out for linear in attention_linears(shape))
        is_dense = layer < num_dense_layers(shape)
        linears = mlp_linears(shape, shape.intermediate) if is_dense else shared_linears(shape)
        yield from (linear.fan_in * linear.fan_out for linear in linears)
        experts = shape.experts
        if experts is not None and not is_dense:
            yield from (experts.num * width * shape.hidden for width in (1, 2 * experts.intermediate))
            yield experts.num * experts.intermediate * shape.hidden
    if has_head and head_params(shape):
        yield head_params(shape)
