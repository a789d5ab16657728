"""Layers that carry state along the row, told where sequences begin: delta nets, Mamba-2, short convolutions.

Attention sees a segment by its table; these layers pass on what they have read from token to token. transformers hands
`cu_seq_lens_q` and `seq_idx` to their kernels, which begin anew at every sequence, and refuses them where the kernels
are not installed. A sequence needs all its tokens then, since the state behind a shared prompt is not to be had: rows
of such models share no prompts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_ext.packing.check import CheckResult
from trl_ext.packing.table import SegmentTable

# What to install: transformers' own sentence names one package at a time.
_KERNELS = (
    "Layers that carry state along the row are packed where their kernels are installed: causal-conv1d, with "
    "flash-linear-attention for delta nets (Qwen3-Next, Qwen3.5), with mamba-ssm for Mamba-2 (Granite 4, Falcon-H1)"
)
# Names of transformers' `layer_types` for layers with such a state, alone or beside attention.
_STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_MARK = "_trl_ext_begins_anew"


def carries_state(config: Any) -> bool:
    """Return True where some layer of the model, by its config, carries state from token to token."""
    return not _STATE_LAYERS.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def begin_anew(model: Any) -> bool:
    """Let the layers of a model begin anew at every segment of a packed forward; idempotent.

    Args:
        model: Of transformers, without wrapper.

    Returns:
        True where some of its layers carry state, so that its rows must share no prompts; False for all other models,
        which stay as they are.
    """
    if not carries_state(model.config):
        return False
    if not getattr(model.base_model, _MARK, False):
        setattr(model.base_model, _MARK, True)
        model.base_model.register_forward_pre_hook(_add_boundaries, with_kwargs=True)
    return True


def why_not(result: CheckResult, config: Any) -> str:
    """Return why a model is not packed after its self-check, and which kernels would let its layers begin anew."""
    return f"{result}. {_KERNELS}" if result.failure and carries_state(config) else str(result)


def _add_boundaries(_backbone: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    table = kwargs.get("segments")
    if isinstance(table, SegmentTable):
        assert all(segment.parent is None for segment in table.segments), "These rows share no prompts."
        number = torch.arange(len(table.lengths), dtype=torch.int32, device=table.device)
        lengths = table.cu_seqlens.diff()
        seq_idx = number.repeat_interleave(lengths, output_size=table.segments[-1].end)[None]
        kwargs |= {"cu_seq_lens_q": table.cu_seqlens, "seq_idx": seq_idx}
    return args, kwargs


@contextmanager
def kernels_of_training(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let layers with state take the kernel of training inside the block, while all else is as in evaluation.

    Mamba-2's layers have one of their own for training, from the projection to the output. A layer with state is known
    by its convolution along the row.
    """
    layers = [
        layer
        for model in models
        for layer in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in layer.children())
    ]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
