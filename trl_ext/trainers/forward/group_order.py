"""Group mates side by side, so that a prompt is forwarded once and not once per micro-batch it was shuffled into.

TRL shuffles the rows of a generation batch before it splits them into micro-batches. Which micro-batch a row is in
does not matter to the gradient of an optimizer step when the loss is a sum over tokens divided by a constant of the
step, or a mean over equally many rows; there the rows of one step may change places.
"""

from typing import Any

import torch

# The loss of a micro-batch is a mean over its rows, or a sum over its tokens divided by its rows; ...
MEAN_OVER_ROWS = frozenset({"grpo", "sapo", "luspo", "dr_grpo"})
# ... a sum over its tokens divided by a constant of the optimizer step; ...
SUM_OVER_TOKENS = frozenset({"dapo", "cispo", "vespo"})
# ... or a mean over its tokens, where the split is part of the loss.
MEAN_OVER_TOKENS = frozenset({"bnpo"})


def split_is_free(args: Any, has_entropy_bonus: bool, has_aux_loss: bool) -> bool:
    """True when moving rows between micro-batches of one optimizer step leaves its gradient as it is."""
    return (
        args.loss_type in MEAN_OVER_ROWS | SUM_OVER_TOKENS
        # These three are means or quantiles over the tokens of a micro-batch.
        and not has_entropy_bonus
        and not has_aux_loss
        and args.top_entropy_quantile == 1.0
    )


def stays_in_step(args: Any) -> bool:
    """True when optimizer steps and generations begin together, so that `regroup` keeps every row in its step.

    Else an optimizer step begins or ends within a generation, at another place each time.
    """
    per_step, generated = args.gradient_accumulation_steps, args.steps_per_generation
    return per_step % generated == 0 or generated % per_step == 0


def regroup(micro_batches: list[dict[str, Any]], per_step: int) -> list[dict[str, Any]]:
    """Sort the rows within each optimizer step by prompt, groups in order of appearance.

    Args:
        micro_batches: TRL's buffer: dicts of tensors and lists with one entry a row, equally many rows each.
        per_step: Micro-batches in one optimizer step.

    Returns:
        As many micro-batches with as many rows; every row stays in its optimizer step.
    """
    result: list[dict[str, Any]] = []
    for start in range(0, len(micro_batches), per_step):
        result += _regroup_step(micro_batches[start : start + per_step])
    return result


def _regroup_step(step: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts = [tuple(row) for batch in step for row in batch["prompt_ids"].tolist()]
    first_seen: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        first_seen.setdefault(prompt, len(first_seen))
    order = sorted(range(len(prompts)), key=lambda i: first_seen[prompts[i]])
    rows = len(prompts) // len(step)
    return [
        {key: _pick(key, step, order[k * rows : (k + 1) * rows], rows) for key in step[k]} for k in range(len(step))
    ]


def _pick(key: str, step: list[dict[str, Any]], rows: list[int], per_batch: int) -> Any:
    first = step[0][key]
    if first is None or (isinstance(first, torch.Tensor) and first.ndim == 0):
        return first
    picked = [step[i // per_batch][key][i % per_batch] for i in rows]
    return torch.stack(picked) if isinstance(first, torch.Tensor) else picked
