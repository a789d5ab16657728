"""Compute log-probabilities of a padded batch on flat rows and return them in the padded batch's shape.

Legend: B rows of the padded batch, P its prompt width, C its completion width, T tokens of a flat row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trl_ext.compat.trl import head_in_cache
from trl_ext.errors import SupportError
from trl_ext.packing.layout import IGNORE_INDEX, PackedRow, lay_out
from trl_ext.packing.plan import PlannedRow
from trl_ext.packing.prefix_cache import PrefixCache
from trl_ext.packing.ulysses import SequenceGroup, sum_over
from trl_ext.trainers.forward.calls import call_flat, only_positions
from trl_ext.trainers.rows.images import GivenImages
from trl_ext.trainers.step.exchange import GroupBatch, agreed_num_forwards, gather_group
from trl_ext.trainers.step.settings import StepSettings
from trl_ext.trainers.step.unpadded import Unpadded, filler, plan_forwards, unpad


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The result of TRL's `_get_per_token_logps_and_entropies`, with the number of tokens forwarded.

    Args:
        logps, entropies: [B, C] 0 where there is no token.
        aux_loss: Load-balancing loss of a mixture of experts, mean over the forwards.
        num_forwarded: Tokens that went through the model.
        values: [B, C] output of the value head if there is any: the expected return before each token.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None
    num_forwarded: int
    values: torch.Tensor | None = None

    def of_rows(self, own: Callable[[torch.Tensor], torch.Tensor]) -> "LogProbs":
        """Return the same for some rows: `own` takes them from a tensor of all."""
        return replace(
            self,
            logps=own(self.logps),
            entropies=None if self.entropies is None else own(self.entropies),
            values=None if self.values is None else own(self.values),
        )


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """A padded batch as flat rows, to be scored without a gradient.

    `of_group` has the padded rows of all processes that forward them together, `batch` the same rows without padding.
    `num_forwards` is equal on all ranks.
    """

    of_group: GroupBatch
    batch: Unpadded
    rows: list[PlannedRow]
    num_forwards: int


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A padded batch as TRL forwards it.

    Args:
        input_ids, attention_mask, width: As in `unpad`.
        images: TRL's arguments or columns for the images of the rows.
        batch_size: Rows of a padded forward; None for all at once.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    width: int
    images: Mapping[str, Any]
    batch_size: int | None = None


def flat_batch(padded: PaddedBatch, settings: StepSettings, accelerator: Any, keep_all: bool = False) -> FlatBatch:
    """Return a padded batch as flat rows. Collective.

    A flat row holds at most the budget, or, without a budget, the tokens of `batch_size` rows packed together.

    Args:
        padded: The batch.
        settings: The settings of the step.
        accelerator: The trainer's accelerator.
        keep_all: Keep every row, scored or not, with its own prompt: an auxiliary loss counts all tokens.
    """
    group, share = settings.group, settings.share_prompt and not keep_all
    given = gather_group(padded.input_ids, padded.attention_mask, padded.width, group, accelerator)
    shown = GivenImages.of(padded.images, len(padded.input_ids), settings.reader, accelerator)
    batch = unpad(given.input_ids, given.attention_mask, given.width).with_images(shown)
    multiple = None
    if settings.caches_prefixes and share:
        multiple = 1 if group is None else group.size
    rows = plan_forwards(batch, share, settings.max_tokens, padded.batch_size, keep_all, multiple)
    return FlatBatch(given, batch, rows, agreed_num_forwards(len(rows), accelerator))


def score_batch(
    model: Callable[..., Any],
    padded: PaddedBatch,
    settings: StepSettings,
    accelerator: Any,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
) -> LogProbs:
    """Return the log-probabilities of a padded batch, scored on flat rows without a gradient. Collective.

    Args:
        model: As training calls it.
        padded, settings, accelerator: As in `flat_batch`.
        compute_entropy, compute_aux_loss: As in TRL.
    """
    flat = flat_batch(padded, settings, accelerator, keep_all=compute_aux_loss)
    with accelerator.autocast():
        result = score(
            model,
            flat.batch,
            flat.rows,
            accelerator.device,
            num_forwards=flat.num_forwards,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            group=settings.group,
        )
    return result.of_rows(flat.of_group.own)


def score(
    model: Callable[..., Any],
    batch: Unpadded,
    rows: Sequence[PlannedRow],
    device: torch.device,
    num_forwards: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    group: SequenceGroup | None = None,
    cache: PrefixCache | None = None,
) -> LogProbs:
    """Forward the rows one by one and return each log-probability at its row and column.

    Args:
        model: Causal model with TRL's fused head, packed attention and `let_positions_be_chosen`, wrapped or not.
        batch: The batch that `rows` were planned from.
        rows: Result of `plan`.
        device: Device of the model's inputs.
        num_forwards: Forwards to make in total, equal on all ranks, as the collectives of ZeRO-3 and DDP need.
            Surplus forwards take one or two tokens and count for nothing.
        compute_entropy, compute_aux_loss: As in TRL.
        group: Processes with the same batch and rows; each forwards a part of every row.
        cache: Prefix cache of a forward of the update, to read or to fill; None if it has no prefix.

    Raises:
        SupportError: The auxiliary loss is asked for, and the model returns nothing to compute it from.
    """
    logps, entropies, values = (_Padded(batch, group) for _ in range(3))
    aux_losses = []
    num_forwarded = 0
    for row, packed in _lay_out(rows, num_forwards, batch, device, group, cache):
        num_forwarded += packed.num_tokens
        with head_in_cache(device.type):
            outputs = forward(model, packed, compute_aux_loss)
        if row.is_prefix:
            assert packed.table.cache is not None
            packed.table.cache.end(outputs.log_probs)
            continue
        logps.add(packed, outputs.log_probs)
        if compute_entropy:
            entropies.add(packed, outputs.entropy)
        if compute_aux_loss:
            if not torch.is_tensor(outputs.aux_loss):
                raise SupportError(
                    "This version of transformers returns no router logits of this model, from which its auxiliary "
                    "loss is computed. Update transformers, or set router_aux_loss_coef to 0."
                )
            aux_losses.append(outputs.aux_loss)
        if outputs.get("token_values") is not None:
            values.add(packed, outputs.token_values)
    whole = logps.whole()
    assert whole is not None, "There is at least one row."
    aux_loss = torch.stack(aux_losses[: len(rows)]).mean() if compute_aux_loss else None
    return LogProbs(whole, entropies.whole(), aux_loss, num_forwarded, values.whole())


def score_values(
    model: Callable[..., Any],
    batch: Unpadded,
    rows: Sequence[PlannedRow],
    device: torch.device,
    num_forwards: int | None = None,
    group: SequenceGroup | None = None,
    **options: Any,
) -> tuple[torch.Tensor, int]:
    """Return the values before each completion token, [B, C], and the number of tokens that went through the model.

    Args:
        model: Returns `token_values` [1, T], the expected return after each token, for a flat row.
        batch, rows, device, num_forwards, group: As in `score`.
        options: More arguments of the model.
    """
    values = _Padded(batch, group)
    num_forwarded = 0
    for row, packed in _lay_out(rows, num_forwards, batch, device, group):
        num_forwarded += packed.num_tokens
        outputs = call_flat(model, packed, **options)
        if row.is_prefix:
            assert packed.table.cache is not None
            packed.table.cache.end(outputs.token_values)
            continue
        values.add(packed, outputs.token_values.index_select(1, _before_scored(packed)))
    whole = values.whole()
    assert whole is not None, "There is at least one row."
    return whole, num_forwarded


def _lay_out(
    rows: Sequence[PlannedRow],
    num_forwards: int | None,
    batch: Unpadded,
    device: torch.device,
    group: SequenceGroup | None,
    cache: PrefixCache | None = None,
) -> Iterator[tuple[PlannedRow, PackedRow]]:
    """Yield each row with its model input, then the surplus forwards.

    Args:
        rows, num_forwards, batch, device, group: As in `score`.
        cache: Of a prefix, to read or to fill; None: each prefix gets a new cache.
    """
    of_prefix, num_scored = cache, batch.num_scored
    for row in [*rows, *[filler(batch)] * max((num_forwards or 0) - len(rows), 0)]:
        if row.is_prefix and cache is None:
            of_prefix = PrefixCache(row.num_tokens)
        scored = np.zeros_like(num_scored) if row.is_prefix else num_scored
        of_row = of_prefix if row.is_prefix or row.num_cached else None
        packed = lay_out(row, batch.sequences, scored, device, of_row)
        if batch.images is not None:
            packed = batch.images.put_into(packed, row, batch.sequences)
        yield row, packed.part(group)


def forward(model: Callable[..., Any], packed: PackedRow, compute_aux_loss: bool = False) -> Any:
    """Call the model once on a flat row, through TRL's fused head.

    The output's fields have one entry for each scored token, in the row's order.
    """
    options = {"output_router_logits": True} if compute_aux_loss else {}
    before = _before_scored(packed)
    with only_positions(before):
        # The label of a position is the next token; a row without scored tokens has one position without a label.
        labels = packed.labels[None]
        if not labels.numel():
            labels = torch.full_like(before, IGNORE_INDEX)[None]
        return call_flat(model, packed, shift_labels=labels, fused_lm_head=True, **options)


def _before_scored(packed: PackedRow) -> torch.Tensor:
    """Return the positions whose hidden state predicts a scored token; position 0 if no token is scored."""
    return packed.before_index if packed.before_index.numel() else packed.before_index.new_zeros(1)


class _Padded:
    """Scored tokens of flat rows, collected at their places in the padded batch.

    With a `group`, each process adds the tokens of its part of the rows.
    """

    def __init__(self, batch: Unpadded, group: SequenceGroup | None):
        self._shape = (len(batch.sequences), batch.width)
        self._group = group
        self._sum: torch.Tensor | None = None

    def whole(self) -> torch.Tensor | None:
        """Return [B, C], 0 where there is no token; None if nothing was added. Collective with a group."""
        return self._sum if self._sum is None or self._group is None else sum_over(self._sum, self._group)

    def add(self, packed: PackedRow, values: torch.Tensor) -> None:
        """Place the values [1, S] of a row's scored tokens.

        A row without scored tokens adds 0 and stays in the graph, so that every rank's backward has the same
        parameters.
        """
        target = packed.scored_item * self._shape[1] + packed.scored_offset
        # A token of several rows gets the sum of their gradients.
        of_rows = values[0].index_select(0, packed.source_index)
        placed = values.new_zeros(self._shape[0] * self._shape[1]).index_put((target,), of_rows)
        if target.numel() == 0:
            placed = placed + 0.0 * values.sum()
        placed = placed.view(self._shape)
        self._sum = placed if self._sum is None else self._sum + placed
