"""How a loss of TRL's is made of its rows, and what that allows: rows in any forward of the step, or in TRL's split.

Which forward a row is in does not matter to the gradient of an optimizer step when the loss is a sum over tokens
divided by a constant of the step, or a mean over equally many rows.
"""

from typing import Any

# The loss of a micro-batch is a mean over its rows, or a sum over its tokens divided by its rows; ...
MEAN_OVER_ROWS = frozenset({"grpo", "sapo", "luspo", "dr_grpo"})
# ... a sum over its tokens divided by a constant of the optimizer step; ...
SUM_OVER_TOKENS = frozenset({"dapo", "cispo", "vespo"})
# ... or a mean over its tokens, where the split into micro-batches is part of the loss.
MEAN_OVER_TOKENS = frozenset({"bnpo"})


def why_micro_batch_stays_whole(args: Any, *, takes_images: bool, has_entropy_bonus: bool, has_aux_loss: bool) -> str:
    """Return why the loss of a GRPO trainer's micro-batch is no weighted sum over its rows; "" if it is one."""
    if args.loss_type not in MEAN_OVER_ROWS | SUM_OVER_TOKENS | MEAN_OVER_TOKENS:
        return f"loss_type='{args.loss_type}' is not known to be a sum over rows"
    if takes_images:
        return "rows may hold images, which are not counted by rows"
    if args.top_entropy_quantile < 1.0:
        return f"top_entropy_quantile={args.top_entropy_quantile} is a quantile over all tokens of the micro-batch"
    if has_entropy_bonus:
        return "the entropy bonus is a mean over all tokens of the micro-batch"
    if has_aux_loss:
        return "the load-balancing loss counts all tokens of the micro-batch together"
    return ""


def why_rows_stay(args: Any, why_whole: str) -> str:
    """Return why a row has to be forwarded in its micro-batch, whatever the model; "" if it need not.

    Args:
        args: The trainer's config.
        why_whole: Why a micro-batch stays whole.
    """
    if why_whole or args.loss_type not in MEAN_OVER_TOKENS:
        return why_whole
    return f"loss_type='{args.loss_type}' is a mean over the tokens of each micro-batch"
