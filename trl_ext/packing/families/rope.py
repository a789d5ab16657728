"""Positions whose frequencies depend on the length of the sequence (dynamic NTK, longrope), in a packed forward.

transformers uses the longest sequence of a forward, so that a row would depend on its neighbours, and dynamic NTK
keeps the frequencies of the previous longest sequence. Here each sequence gets the frequencies of its length. A shared
prompt would have another length in every completion, so such rows share no prompts.
"""

from functools import partial
from typing import Any

import torch

from trl_ext.packing.attention import in_packed_forward

_KINDS = ("dynamic", "longrope")


def kinds_of(config: Any) -> set[str]:
    """Return the kinds of positions in a text config that depend on the length of a row."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    return {kind for kind in _KINDS if kind in kinds}


def original_length(config: Any) -> int:
    """Return the most tokens of a row whose frequencies do not change with its length, for a config of such kinds."""
    rope = config.rope_parameters
    parts = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    return min(one.get("original_max_position_embeddings") or config.max_position_embeddings for one in parts)


def begin_anew(model: Any) -> None:
    """Give each sequence of a packed forward the frequencies of its length; idempotent. Other models are unchanged."""
    for module in model.modules() if kinds_of(model.config.get_text_config()) else ():
        if hasattr(module, "rope_type") and not isinstance(module.forward, partial):
            module.forward = partial(_by_sequence, module.forward)


def _by_sequence(forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not in_packed_forward():
        return forward(x, position_ids, *args, **kwargs)
    return _each_sequence(forward, x, position_ids, *args, **kwargs)


@torch.compiler.disable
def _each_sequence(forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    starts = (position_ids[0] == 0).nonzero().flatten()
    parts = []
    for positions in position_ids.tensor_split(starts[1:].cpu(), dim=1):
        forward(x, positions[:, :1], *args, **kwargs)  # one position: resets dynamic NTK's last length
        parts.append(forward(x, positions, *args, **kwargs))
    cos, sin = zip(*parts, strict=True)
    return torch.cat(cos, dim=1), torch.cat(sin, dim=1)
