"""Exchange of rollout rows between ranks: a row may be trained on a rank that did not generate it.

Each rank pads its rows to its own longest prompt and completion, so widths differ between ranks. Shapes: `B` rows of
a rank, `P` columns of its prompts (padding on the left), `C` columns of its completions (padding on the right).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch.nn.functional import pad

from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.rows.images import whole_rows

_MASKS = ("prompt_mask", "completion_mask")
# Bytes of all ranks' rows that are gathered at once: a step of 32,768 rows of 8,192 columns has 2 GiB of ids alone.
GATHERED_BYTES = 64 << 20


def agreed_num_forwards(num_forwards: int, accelerator: Any) -> int:
    """Return the largest count of any rank: the forwards of ZeRO-3 and DDP are collectives. Collective."""
    counts = accelerator.gather(torch.tensor([num_forwards], device=accelerator.device))
    return int(counts.max().item())


def redistribute(batch: dict[str, Any], rows_of_ranks: Sequence[Sequence[int]], accelerator: Any) -> dict[str, Any]:
    """Give every rank the rows assigned to it. Collective; with one process a plain selection.

    Keys are exchanged in turn, and large ones some rows at a time, so that no rank holds more than `GATHERED_BYTES` of
    the rows of all ranks at once.

    Args:
        batch: This rank's rows: tensors [B, ...] and lists of `B` entries; tensors without dimensions and other values
            are returned unchanged. Tensors as wide as `prompt_mask` [B, P] (by name `prompt_*`) or `completion_mask`
            [B, C] may differ in width between ranks. All ranks have the same keys and equally many rows.
        rows_of_ranks: For each rank its rows, in order. Row `k` of rank `r` has the number `r * B + k`. A rank may get
            any number of rows, and a row may go to several ranks or to none.
        accelerator: The trainer's accelerator.

    Returns:
        The rows of this rank, cut to the columns that their prompts and completions need.
    """
    everywhere, mine = _sizes_everywhere(batch), list(rows_of_ranks[accelerator.process_index])
    found: dict[str, Any] = {}
    used: dict[str, slice] = {}
    for key in sorted(batch, key=lambda key: (key not in _MASKS, key)):  # masks first: they mark the padding
        value, sizes = batch[key], [sizes[key] for sizes in everywhere]
        if not _size(value):
            found[key] = value
        elif isinstance(value, torch.Tensor):
            mask = "prompt_mask" if key.startswith("prompt_") else "completion_mask"
            # As wide as the mask on every rank: one value per token. One value per row, [B, 1], looks the same only
            # if all masks have one column, and then that column is needed.
            is_padded = value.ndim == 2 and sizes == [sizes.get(mask) for sizes in everywhere]
            if is_padded:
                value = _widen(value, max(width for _, width in sizes), is_prompt=mask == "prompt_mask")
            found[key] = _rows_from(value, mine, accelerator)
            if key in _MASKS:
                used[key] = _used_columns(found[key])
            if is_padded:
                found[key] = found[key][:, used[mask]]
        else:
            entries = gather_object(send_to_device(value, "cpu"))
            found[key] = send_to_device([entries[row] for row in mine], accelerator.device)
    return {key: found[key] for key in batch}


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """A padded batch that goes through a model, and the part that belongs to this process."""

    input_ids: torch.Tensor  # [N, P + C] rows of all processes of the group, in process order
    attention_mask: torch.Tensor  # as `input_ids`
    width: int  # C
    first: int  # index of this process's first row
    own_shape: tuple[int, int]  # B and the completion width of this process's rows

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return this process's rows, [B, C] in their original width, of values [N, C] that are 0 on padding."""
        rows, width = self.own_shape
        if values.shape == self.own_shape:
            return values
        return pad(values[self.first : self.first + rows], (0, width - self.width))


def gather_group(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, group: SequenceGroup | None, accelerator: Any
) -> GroupBatch:
    """Return the rows of all processes of the group as one batch. Collective; without a group, this process's rows.

    Args:
        input_ids, attention_mask: [B, P + C]; all processes have equally many rows.
        width: C, the completion width.
        group: Processes that share rows; None without sharing.
        accelerator: The trainer's.
    """
    shape = len(input_ids), width
    if group is None:
        return GroupBatch(input_ids, attention_mask, width, 0, shape)
    prompts = input_ids.size(1) - width
    batch = {
        "prompt_ids": input_ids[:, :prompts],
        "prompt_mask": attention_mask[:, :prompts],
        "completion_ids": input_ids[:, prompts:],
        "completion_mask": attention_mask[:, prompts:],
    }
    in_group = len(input_ids) * group.size
    firsts = [rank // group.size * in_group for rank in range(accelerator.num_processes)]
    here = redistribute(batch, [range(first, first + in_group) for first in firsts], accelerator)
    return GroupBatch(*whole_rows(here), here["completion_ids"].size(1), group.rank * len(input_ids), shape)


def _sizes_everywhere(batch: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Return the size of each value of the batch on each rank, as in `_size`. Collective."""
    everywhere = gather_object([{key: _size(value) for key, value in batch.items()}])
    assert all(sizes.keys() == batch.keys() for sizes in everywhere), "ranks hold other keys"
    num_rows = {size[0] for sizes in everywhere for size in sizes.values() if size}
    assert len(num_rows) <= 1, f"ranks or keys hold other numbers of rows: {sorted(num_rows)}"
    return everywhere


def _widen(value: torch.Tensor, width: int, *, is_prompt: bool) -> torch.Tensor:
    """Return [B, `width`]: prompts have their new columns on the left, completions on the right."""
    missing = width - value.size(1)
    return pad(value, (missing, 0) if is_prompt else (0, missing))


def _used_columns(mask: torch.Tensor) -> slice:
    """Return the first to the last column in which some row has a token; one column if there is no token."""
    columns = mask.any(dim=0).nonzero().flatten().tolist() or [0]
    return slice(columns[0], columns[-1] + 1)


def _rows_from(value: torch.Tensor, wanted: Sequence[int], accelerator: Any) -> torch.Tensor:
    """Return the rows with the numbers `wanted` of all ranks' rows, in this order. Collective.

    Args:
        value: This rank's `B` rows, [B, ...], of one shape on all ranks.
        wanted: Row `k` of rank `r` has the number `r * B + k`.
        accelerator: The trainer's accelerator.
    """
    num_rows = len(value)
    numbers = torch.tensor(wanted, dtype=torch.long, device=value.device)
    found = value.new_zeros(len(wanted), *value.shape[1:])
    row_bytes = accelerator.num_processes * value[:1].nbytes
    at_once = max(GATHERED_BYTES // max(row_bytes, 1), 1)
    for begin in range(0, num_rows, at_once):
        some = value[begin : begin + at_once].contiguous()
        # Not every backend gathers bool, but all gather bytes.
        gathered = accelerator.gather(some.byte()).bool() if some.dtype == torch.bool else accelerator.gather(some)
        rank, row = numbers // num_rows, numbers % num_rows - begin
        is_here = (row >= 0) & (row < len(some))
        found[is_here] = gathered[(rank * len(some) + row)[is_here]]
    return found


def _size(value: Any) -> tuple[int, ...]:
    """Return the number of rows and a row's shape; () for values without rows."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list) else ()
