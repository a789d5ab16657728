"""Attention over the tree rows of TRL's AsyncGRPOTrainer, registered under the name that TRL gives it.

TRL folds the samples of a row into a tree of tokens, cuts it into segments, and copies for each segment the keys on
its path. The same rows are segment tables here, so any device attends within them, and a shared key is there once.

Legend: N tokens of the row, S segments, K keys of all paths.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from trl_ext.compat.transformers import is_flash, register_attention, register_mask
from trl_ext.errors import ConfigError
from trl_ext.packing.attention import WindowMask, attend, window_of_mask
from trl_ext.packing.plan import Segment
from trl_ext.packing.table import SegmentTable, tokens_of

TREE_ATTENTION = "tree_fa3"  # TRL's name


def register_tree_attention() -> None:
    """Attend to tree rows in all models of this process: by flash-attention if it is installed and there is a card."""
    installed = {"flash_attention_3": is_flash_attn_3_available, "flash_attention_2": is_flash_attn_2_available}
    base = next((name for name, is_there in installed.items() if is_there()), "sdpa")
    register_attention(TREE_ATTENTION, partial(tree_attention, base=base))
    register_mask(TREE_ATTENTION, partial(window_of_mask, base))


@torch.compiler.disable
def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: WindowMask | None,
    *,
    base: str,
    tree_kv_index: torch.Tensor | None = None,
    tree_cu_seqlens_q: torch.Tensor | None = None,
    tree_cu_seqlens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one attention layer of a tree row by the kernels of `base`; other arguments as in `attend`.

    Args:
        tree_kv_index: [K] places of the keys that each segment sees, segment by segment.
        tree_cu_seqlens_q, tree_cu_seqlens_k: [S + 1] boundaries of the segments, and of their keys.

    Raises:
        ConfigError: The row is not such a tree.
    """
    if tree_kv_index is None or tree_cu_seqlens_q is None or tree_cu_seqlens_k is None:
        raise ConfigError(
            f"{type(module).__name__} was called without the tree of its row, which its attention needs. Load the "
            "model again for other forwards, or take a TRL that trl_ext was tested with."
        )
    # All layers of a forward, and their recomputation, get the same tensor.
    kept = vars(tree_kv_index)
    if "segment_table" not in kept:
        kept["segment_table"] = table_of_tree(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
    if attention_mask is None and not is_flash(base) and (window := kwargs.get("sliding_window")):
        attention_mask = WindowMask(window)
    return attend(module, query, key, value, attention_mask, base=base, segments=kept["segment_table"], **kwargs)


def table_of_tree(kv_index: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> SegmentTable:
    """Return the segment table of a tree row; arguments as in `tree_attention`.

    Raises:
        ConfigError: The keys of a segment are not a chain of whole segments that ends with itself.
    """
    places, ends, key_ends = kv_index.numpy(force=True), cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    segments: list[Segment] = []
    ends_at: dict[int, int] = {}  # number of the segment that ends at a place
    for (start, end), (first, last) in zip(pairwise(ends), pairwise(key_ends), strict=True):
        offset = last - first - (end - start)
        # The token before the segment is the last one of its parent.
        parent = ends_at.get(places[first + offset - 1] + 1) if offset else None
        ends_at[end] = len(segments)
        segments.append(Segment(start, end, item=len(segments), offset=offset, parent=parent))
    table = SegmentTable(tuple(segments), kv_index.device)
    seen = [segments[number] for chain in table.chains for number in chain]
    if not np.array_equal(tokens_of(seen), places):
        raise ConfigError(
            "This TRL lays out its rows in another way than the trees that trl_ext attends within. Take TRL's own "
            "AsyncGRPOTrainer, or a TRL that trl_ext was tested with."
        )
    return table
