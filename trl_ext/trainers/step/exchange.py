"""Rows of rollouts that change ranks: which rank trains on a row need not be the rank that generated it.

Rows of a rank are padded to its own longest prompt and completion, so widths differ between ranks. Shapes: `B` rows of
a rank, `P` columns of its prompts (padding on the left), `C` columns of its completions (padding on the right).
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch.nn.functional import pad

_MASKS = ("prompt_mask", "completion_mask")


def agreed_num_forwards(num_forwards: int, accelerator: Any) -> int:
    """Return the largest count of any rank: the forwards of ZeRO-3 and DDP are collectives. Collective."""
    counts = accelerator.gather(torch.tensor([num_forwards], device=accelerator.device))
    return int(counts.max().item())


def redistribute(batch: dict[str, Any], rows_of_ranks: Sequence[Sequence[int]], accelerator: Any) -> dict[str, Any]:
    """Give every rank the rows that it is to have. Collective; with one process a plain selection.

    One key at a time crosses the ranks, so that no rank holds the rows of all ranks at once.

    Args:
        batch: This rank's rows: tensors [B, ...] and lists of `B` entries; tensors without dimensions and anything
            else pass. Tensors as wide as `prompt_mask` [B, P] (by name `prompt_*`) or `completion_mask` [B, C] may
            have another width on each rank. All ranks have the same keys, and equally many rows.
        rows_of_ranks: For each rank the rows that it is to have, in order. Row `k` of rank `r` has the number
            `r * B + k`. A rank may get any number of rows, a row may go to several ranks or to none.
        accelerator: accelerate's.

    Returns:
        The rows of this rank, cut to the columns that their prompts and completions need.
    """
    rank = accelerator.process_index
    everywhere = gather_object([{key: _size(value) for key, value in batch.items()}])
    assert all(sizes.keys() == everywhere[rank].keys() for sizes in everywhere), "ranks hold other keys"
    num_rows = {size[0] for sizes in everywhere for size in sizes.values() if size}
    assert len(num_rows) <= 1, f"ranks or keys hold other numbers of rows: {sorted(num_rows)}"
    mine = list(rows_of_ranks[rank])

    found: dict[str, Any] = {}
    used: dict[str, slice] = {}
    for key in sorted(batch, key=lambda key: (key not in _MASKS, key)):  # masks first: they tell what is padding
        value, sizes = batch[key], [sizes[key] for sizes in everywhere]
        if not sizes[rank]:
            found[key] = value
        elif isinstance(value, torch.Tensor):
            mask = "prompt_mask" if key.startswith("prompt_") else "completion_mask"
            # As wide as the mask on every rank: a value a token. A value a row, [B, 1], is that only where all masks
            # have one column, and then the column is needed.
            is_padded = value.ndim == 2 and sizes == [sizes.get(mask) for sizes in everywhere]
            if is_padded:
                missing = max(width for _, width in sizes) - value.size(1)
                value = pad(value, (missing, 0) if mask == "prompt_mask" else (0, missing))
            # Not every backend gathers bool, but all gather bytes.
            whole = accelerator.gather(value.byte()).bool() if value.dtype == torch.bool else accelerator.gather(value)
            found[key] = whole[torch.tensor(mine, dtype=torch.long, device=whole.device)]
            if key in _MASKS:
                # From the first to the last column in which some row has a token; one column if no row has any.
                columns = found[key].any(dim=0).nonzero().flatten().tolist() or [0]
                used[key] = slice(columns[0], columns[-1] + 1)
            if is_padded:
                found[key] = found[key][:, used[mask]]
        else:
            entries = gather_object(send_to_device(value, "cpu"))
            found[key] = send_to_device([entries[row] for row in mine], accelerator.device)
    return {key: found[key] for key in batch}


def _size(value: Any) -> tuple[int, ...]:
    """Return the number of rows and a row's shape, or nothing for what has no rows."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list) else ()
