"""transformers: attention by name, and who divides the loss."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_ext.compat.versions import is_older

if TYPE_CHECKING:  # attention alone needs no Trainer, which loads pandas
    from transformers import Trainer


def attention_function(name: str) -> Callable[..., Any]:
    """Return transformers' own attention function of this name."""
    return ALL_ATTENTION_FUNCTIONS[name]


def mask_function(name: str) -> Callable[..., Any]:
    """Return transformers' own mask function of this name."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make `name` an attention implementation that models can be switched to."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def let_loss_be_scaled(trainer: "Trainer") -> None:
    """Tell a Trainer that `compute_loss` divides by all items of an optimizer step itself."""
    trainer.loss_is_scaled_for_ga = True
    # Issue: before 5.19 transformers reads another attribute for the same.
    # Fixed in: transformers 5.19.
    # Remove when: transformers>=5.19 is the lower bound.
    if is_older("transformers", than="5.19"):
        # Only compared with None, as `compute_loss` is overridden.
        trainer.compute_loss_func = "not None: the loss is scaled already"  # type: ignore[assignment]
