"""Memory options, a row each: settings that change the bytes and seconds of a run, and not its optimisation.

A new option is a field of `Job`, a row of `OPTIONS`, and the code that it switches on in a run. Contradictions,
formulas, the planner's search, names of plans, and the keys of recipes and runs read the rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from trl_ext.memory.models.shapes import ModelShape

LAYERS = "gradient_checkpointing_kwargs"  # the block of a recipe with options of checkpointed layers


def _no_bytes(shape: ModelShape) -> dict[str, int]:
    return {}


def _never(job: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Option:
    """A memory option, which is on or off.

    Args:
        name: The field of `Job`, and the key of a recipe.
        label: The option in the name of a plan, after the other words about checkpointing.
        conflict: A row of `contradictions`: settings with which the option does not work, and what to do.
        block: The block of a recipe that holds the key; "" for none.
        is_tried: True for a job to which the planner adds the option if it then still fits.
        layer_bytes: Bytes per token and checkpointed layer that the option adds, by term of a footprint.
        recomputed: Shares of the "linear" part and of "attention" that the backward of a checkpointed layer computes
            again; 1 for a part that is left out.
    """

    name: str
    label: str
    conflict: tuple[Callable[..., bool], str]
    block: str = ""
    is_tried: Callable[[Any], bool] = _never
    layer_bytes: Callable[[ModelShape], dict[str, int]] = _no_bytes
    recomputed: Mapping[str, float] = field(default_factory=dict)


def _kept_attention(shape: ModelShape) -> dict[str, int]:
    """Attention's output and log-sum-exp, 2*nq*d + 4*nq: the checkpoint holds them, and not the layer at work."""
    kept = 2 * shape.q_width + 4 * shape.num_heads
    return {"checkpoints": kept, "layer work": -kept}


OPTIONS = (
    Option(
        name="keep_attention",
        label=", attention kept",
        conflict=(
            lambda keep_attention, packing, checkpoint_every: keep_attention and not (packing and checkpoint_every),
            "attention is kept of checkpointed layers and packed rows. Set checkpoint_every and packing, or drop it.",
        ),
        block=LAYERS,
        # Under ZeRO-3 TRL checkpoints adapters with reentrant checkpointing, which cannot keep attention's output.
        is_tried=lambda job: (
            job.packing
            and job.checkpoint_every
            and not job.activation_offloading
            and not (job.uses_lora and job.zero_stage == 3)
        ),
        layer_bytes=_kept_attention,
        recomputed={"attention": 0.0},
    ),
    # Its bytes are in `formulas.peak`, its seconds in `formulas.times`: checkpoints wait elsewhere, as a whole. The
    # planner tries it as the last step of `choices.CHECKPOINTING`.
    Option(
        name="activation_offloading",
        label=" into host memory",
        conflict=(
            lambda activation_offloading, trainer: activation_offloading and trainer != "reward",
            "it is the reward trainer's. Remove it.",
        ),
    ),
)


def options_of(job: Any) -> list[Option]:
    """Return the options that are on in a job."""
    return [option for option in OPTIONS if getattr(job, option.name)]


def layer_bytes(term: str, shape: ModelShape, job: Any) -> int:
    """Bytes per token and checkpointed layer that the job's options add to a term."""
    return sum(option.layer_bytes(shape).get(term, 0) for option in options_of(job))


def recompute_share(part: str, job: Any) -> float:
    """Share of a part of checkpointed layers that the job's backward computes again: 1 without options."""
    return prod(option.recomputed.get(part, 1.0) for option in options_of(job))
