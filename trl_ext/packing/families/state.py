"""Layers that carry state along the row, in packed forwards: delta nets, Mamba-2, short convolutions.

Attention separates segments by the table; these layers pass their state from token to token. Their functions in
transformers' model files are replaced by functions with the keyword `state_order`: a segment continues from the
state of its prefix, and a segment without a prefix starts from zero. Rows without prefixes use installed kernels that
restart at every sequence. Layers with other functions also need such kernels, and their rows share no prompts.

Legend: T tokens of the flat row, N segments of a call, L tokens of the longest of them, C channels, W taps of a
convolution, H heads, D head size.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch

from trl_ext.compat.transformers import is_kernel
from trl_ext.errors import PackingError
from trl_ext.packing.families.recurrence import StateOrder
from trl_ext.packing.table import SegmentTable

# transformers' `layer_types` for layers with state, alone or combined with attention.
_STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_MARK = "_trl_ext_begins_anew"


def carries_state(config: Any) -> bool:
    """Return True if some layer of the model, by its config, carries state from token to token."""
    return not _STATE_LAYERS.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def begin_anew(model: Any) -> bool:
    """Make layers with state start every segment of a packed forward from the state of its prefix; idempotent.

    Returns:
        False if layers of the unwrapped model carry state by unknown functions, so that its rows must not share
        prompts; True for all other models. Models without such layers are unchanged.
    """
    if not carries_state(model.config):
        return True
    layers = list(_layers_with_state(model))
    goes_by_segment = bool(layers) and all(map(_goes_by_segment, layers))
    if not getattr(model.base_model, _MARK, False):
        setattr(model.base_model, _MARK, True)
        model.base_model.register_forward_pre_hook(_add_order, with_kwargs=True)
        if goes_by_segment:
            model.base_model.register_forward_hook(_check_order, with_kwargs=True)
    for modeling in {sys.modules[type(layer).__module__] for layer in layers}:
        for name, by_segment in _BY_SEGMENT.items():
            if not isinstance(plain := getattr(modeling, name, None), StateDispatch | None):
                setattr(modeling, name, StateDispatch(plain, by_segment))
    return goes_by_segment


def _layers_with_state(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers with state, which are recognized by their convolution along the row."""
    return filter(_convolves, model.modules())


def _convolves(layer: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.Conv1d) for child in layer.children())


def _goes_by_segment(layer: torch.nn.Module) -> bool:
    modeling = sys.modules[type(layer).__module__]
    # Layers with a recurrence in addition to the convolution have its decay.
    is_recurrent = hasattr(layer, "A_log")
    has_recurrence = any(hasattr(modeling, name) for name in _RECURRENCES)
    return hasattr(modeling, "causal_conv1d_fn") and (has_recurrence or not is_recurrent)


def _add_order(_backbone: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    table = kwargs.get("segments")
    return args, (kwargs | _order_of(table) if isinstance(table, SegmentTable) else kwargs)


# If compiled, it would be compiled again for every row.
@torch.compiler.disable
def _order_of(table: SegmentTable) -> dict[str, Any]:
    order = StateOrder(table)
    own = {} if order.shares else {"cu_seq_lens_q": table.cu_seqlens, "seq_idx": order.number_of_sequence}
    return {"state_order": order, **own}


def _check_order(_backbone: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
    """Raise PackingError if the order reached no layer: a short convolution's leak may be too small to detect.

    Args:
        _backbone, _args, _output: Of the hook, unused.
        kwargs: Of the call, with the order.
    """
    order = kwargs.get("state_order")
    if isinstance(order, StateOrder) and not _is_read(order):
        raise PackingError("Its layers with state do not pass on where sequences begin")


@torch.compiler.disable
def _is_read(order: StateOrder) -> bool:
    return bool(order.is_read)


class StateDispatch:
    """A function of transformers' layers with state, which works by segments if a forward has their order.

    `plain` is the function in the model file. `by_segment` is called with `plain`, the order, and the arguments.
    """

    def __init__(self, plain: Callable[..., Any], by_segment: Callable[..., Any]):
        update_wrapper(self, plain)
        self.plain, self.by_segment = plain, by_segment

    def __call__(self, *args: Any, state_order: Any = None, **kwargs: Any) -> Any:
        is_packed = isinstance(state_order, StateOrder)
        return self._go(state_order, *args, **kwargs) if is_packed else self.plain(*args, **kwargs)

    # If compiled, it would be compiled again for every row.
    @torch.compiler.disable
    def _go(self, order: StateOrder, *args: Any, **kwargs: Any) -> Any:
        order.is_read.append(True)
        if not order.shares and is_kernel(self.plain):
            return self.plain(*args, **kwargs)
        own = {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens_q", "cu_seqlens", "seq_idx")}
        return self.by_segment(self.plain, order, *args, **own)


def _convolution(
    plain: Callable[..., Any], order: StateOrder, x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Convolve by segments.

    Args:
        plain: The layer's function.
        order: The segments of the row.
        x: [1, C, T].
        weight: [C, W].
        args, options: Passed on.
    """
    layout = order.reads(weight.shape[-1] - 1)
    laid = x[0].mT.index_select(0, layout.inputs).index_fill_(0, layout.is_zero, 0.0)
    return plain(laid.mT[None], weight, *args, **options)[0].mT.index_select(0, layout.own).mT[None]


def _delta_rule(
    plain: Callable[..., Any],
    order: StateOrder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Run the delta rule over a row by segments. States are [N, H, D, D].

    Args:
        plain: The model file's function, whose signature the rest has (gated delta net).
        order: Segments of the row.
        query, key: [1, T, H, D].
        value: [1, T, H, D].
        g, beta: [1, T, H, ...] logarithm of the decay, and strength of a new value.
        chunk_size: Tokens that a chunk of the recurrence has.
        initial_state, output_final_state: The model's values, which the segments' states replace.
        options: Further keywords for `plain`.
    """
    has_kernel = is_kernel(plain)
    arrangement = order.arranged(is_padded=not has_kernel)

    def recurrence(inputs: Any, call: Any, first: torch.Tensor | None, needs_final: bool) -> Any:
        """Run the model's delta rule over segments, and return the outputs and the last states, None if not asked for.

        Args:
            inputs: Tensors of the call, as `take` has arranged them.
            call: The segments of the call.
            first: State at each segment's start, None for zeros.
            needs_final: Whether segments follow that begin with the last states.
        """
        q, k, v, g, beta = inputs
        own = {"cu_seqlens": call.cu_seqlens} if has_kernel else {"chunk_size": _even(call.shape[1], chunk_size)}
        others = own | options
        return plain(q, k, v, g=g, beta=beta, initial_state=first, output_final_state=needs_final, **others)

    # Without decay and without a new value, padding does not change the state.
    inputs = [*map(arrangement.take, (query, key, value)), *(arrangement.take(x, True) for x in (g, beta))]
    return arrangement.run(inputs, recurrence), None


def _scan(
    plain: Callable[..., Any],
    order: StateOrder,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Scan a row by segments. States are [N, H, D, state size].

    Args:
        plain: The model file's function, whose signature the rest has (Mamba 2).
        order: Segments of the row.
        x: [1, T, H, D].
        dt: [1, T, H] time steps before bias and softplus.
        A: [H] decay of each head.
        B, C: [1, T, groups, state size].
        chunk_size: Tokens that a chunk of the scan has.
        dt_bias: [H], added to `dt`.
        dt_softplus: Whether `dt` passes a softplus.
        dt_limit: Smallest and largest time step.
        initial_states, return_final_states: The model's values, which the segments' states replace.
        options: Further keywords for `plain`.
    """
    has_kernel = is_kernel(plain)
    # The kernels start one state per row of the batch, so segments are padded for them too.
    arrangement = order.arranged(is_padded=True)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias
    steps = (torch.nn.functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)

    def recurrence(inputs: Any, call: Any, first: torch.Tensor | None, needs_final: bool) -> Any:
        """Run the model's scan over segments, and return the outputs and the last states, None if not asked for.

        Args:
            inputs: Tensors of the call, as `take` has arranged them.
            call: The segments of the call.
            first: State at each segment's start, None for zeros.
            needs_final: Whether segments follow that begin with the last states.
        """
        x, dt, B, C = inputs
        chunk = chunk_size if has_kernel else _even(call.shape[1], chunk_size)
        out = plain(x, dt, A, B, C, chunk_size=chunk, initial_states=first, return_final_states=needs_final, **options)
        return out if needs_final else (out, None)

    # With a time step of 0, padding does not change the state.
    inputs = [arrangement.take(x), arrangement.take(steps, True), arrangement.take(B), arrangement.take(C)]
    return arrangement.run(inputs, recurrence)


def _unfused(*_args: Any, **_kwargs: Any) -> None:
    """Return None, so that Mamba-2's layers call the convolution and the scan instead of one kernel for both."""


# Functions in transformers' model files, and their replacements by segments.
_RECURRENCES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
_BY_SEGMENT: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _unfused,
}


def _even(length: int, chunk_size: int) -> int:
    """Return the size of equally many chunks that are as even as possible: 33 for 65 tokens in chunks of 64."""
    return -(-length // -(-length // chunk_size))


@contextmanager
def kernels_of_training(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Make layers with state use their training kernel inside the block, while the rest is in evaluation mode.

    Mamba-2's layers have a separate kernel for training, from the projection to the output.
    """
    layers = [layer for model in models for layer in _layers_with_state(model)]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
