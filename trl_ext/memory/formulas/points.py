"""A layer's backward point by point, its repeated forward included: what stands beside gathered weights.

Counted on fake tensors in Llama, Qwen 2, Phi-3 and Gemma 3, with all weights trained and with LoRA. A point's work is
the layer's work (`activations.work_bytes`) less what has not come yet or is gone.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Point:
    """Where a part of a layer's work begins; it lasts until the next one.

    Args:
        module: Of the layer, by the name that `visiting` gives it.
        enters: It begins before the module, or after it.
        forward: In the repeated forward, or in backward.
        mlps, hiddens: Bytes a token beyond the layer's work, in multiples of the MLP's width and of H.
        gradients: Of the MLP (`states.mlp_gradient_bytes`): "none", "down" when that projection's is made, "kept" if
            it waits, "up" for those that stand when the projection up has its own.
        heads: Bytes a token in multiples of the queries' width.
        reduces: Not the part itself but its end, when its gradient has come and those before it are reduced.
    """

    module: str
    enters: bool
    forward: bool
    mlps: float = 0.0
    hiddens: float = 0.0
    gradients: str = "none"
    heads: float = 0.0
    reduces: bool = False

    def more(self, mlp: int, hidden: int, queries: int) -> float:
        """Bytes a token beyond the layer's work."""
        return self.mlps * mlp + self.hiddens * hidden + self.heads * queries


# The ends of a layer: its attention goes forward again, and last of all goes backward.
_BEFORE = (
    Point("input_norm", True, True, -12, 0),
    Point("self_attn", True, True, -12, 0),
    Point("q_norm", True, True, -12, 0, heads=6),
    Point("o_proj", True, True, -12, 0),
    Point("o_proj.W", True, True, -12, 0),
)
_AFTER = (
    Point("self_attn", True, False, -12, 0),
    Point("q_norm", True, False, -12, 0, heads=10),
    Point("q_norm", False, False, -12, 0),
)
_FULL_BEFORE = (
    *_BEFORE,
    Point("mlp_norm", True, True, -12, 6),
    Point("mlp", True, True, -12, 2),
    Point("gate_proj.W", True, True, -10, 2),
    Point("act", True, True, -8, 2),
    Point("up_proj.W", True, True, -6, 2),
)
_FULL_AFTER = (Point("mlp_norm", True, False, -12, 4, "kept"), *_AFTER, Point("input_norm", True, False, -12, 3))
_LORA_BEFORE = (
    *_BEFORE,
    Point("mlp_norm", True, True, -12, 10),
    Point("mlp", True, True, -12, 4),
    Point("gate_proj.W", True, True, -10, 4),
    Point("gate_proj.B", True, True, -8, 4),
    Point("gate_proj.B", False, True, -6, 4),
    Point("act", True, True, -8, 4),
    Point("up_proj.W", True, True, -6, 4),
    Point("up_proj.B", True, True, -4, 4),
    Point("up_proj.B", False, True, -2, 4),
    Point("up_proj", False, True, -4, 4),
)
_LORA_AFTER = (Point("mlp_norm", True, False, -12, 18), *_AFTER, Point("input_norm", True, False, -12, 7))
_LORA_UNFUSED = (
    Point("up_proj", True, False, -4, 0),
    Point("up_proj.A", True, False, -6, 4),
    Point("act", True, False, -6, 2),
    Point("gate_proj", True, False, -8, 2),
    Point("gate_proj.A", True, False, -10, 6),
    *_LORA_AFTER,
)
# Work is that at the backward of the MLP's product, and more.
POINTS = {
    "full": (
        *_FULL_BEFORE,
        Point("up_proj.W", False, True, -4, 2),
        Point("down_proj.W", True, True, -2, 0, "down"),
        Point("down_proj.W", False, False, 0, 0, "kept"),
        Point("up_proj.W", True, False, -6, 2, "up"),
        Point("act", True, False, -6, 2, "kept"),
        Point("gate_proj.W", True, False, -10, 4, "up"),
        *_FULL_AFTER,
    ),
    "full, fused": (
        *_FULL_BEFORE,
        Point("gate_up_proj.W", True, True, -8, 2),
        Point("act", True, True, -6, 2),
        Point("act", False, True, -4, 2),
        Point("down_proj.W", True, True, -2, 0, "down"),
        Point("down_proj.W", False, False, 0, 0, "kept"),
        Point("act", True, False, -2, 0, "kept"),
        Point("gate_up_proj.W", True, False, -8, 2, "up"),
        *_FULL_AFTER,
        Point("self_attn", True, False, -12, 4),
    ),
    "full, four norms": (
        *_BEFORE,
        Point("attn_norm", True, True, -12, 10),
        Point("mlp", True, True, -12, 4),
        Point("gate_proj.W", True, True, -10, 6),
        Point("act", True, True, -8, 6),
        Point("up_proj.W", True, True, -6, 6),
        Point("up_proj.W", False, True, -4, 6),
        Point("down_proj.W", True, True, -4, 8),
        Point("last_norm", True, True, -4, 24),
        Point("down_proj.W", True, False, -2, 2, "down"),
        Point("down_proj.W", False, False, 0, 0, "kept"),
        Point("up_proj.W", True, False, -6, 4, "up"),
        Point("act", True, False, -6, 2, "kept"),
        Point("gate_proj.W", True, False, -10, 4, "up"),
        *_FULL_AFTER,
        Point("mlp_norm", True, False, -12, 14, "kept"),
    ),
    "lora": (
        *_LORA_BEFORE,
        Point("down_proj.W", True, True, -4, 8),
        Point("down_proj.A", True, False, -2, 0),
        Point("down_proj.W", True, False, 0, 0),
        *_LORA_UNFUSED,
    ),
    "lora, fused": (
        *_LORA_BEFORE,
        Point("gate_up_proj.W", True, True, -8, 4),
        Point("gate_up_proj.B", True, True, -4, 4),
        Point("gate_up_proj.B", False, True, 0, 4),
        Point("gate_up_proj", False, True, -8, 4),
        Point("act", True, True, -6, 4),
        Point("act", False, True, -4, 4),
        Point("down_proj.W", True, True, -4, 8),
        Point("down_proj.A", True, False, -2, 0),
        Point("down_proj.W", True, False, 0, 0),
        Point("act", True, False, -2, 0),
        Point("gate_up_proj", True, False, -4, 0),
        Point("gate_up_proj.A", True, False, -8, 4),
        *_LORA_AFTER,
        Point("self_attn", True, False, -12, 6),
    ),
    "lora, four norms": (
        *_LORA_BEFORE,
        Point("attn_norm", True, True, -12, 10),
        Point("down_proj.W", True, True, -4, 10),
        Point("last_norm", True, True, -4, 22),
        Point("last_norm", True, False, -4, 22),
        Point("down_proj.A", True, False, -2, 0),
        Point("down_proj.W", True, False, 0, 0),
        *_LORA_UNFUSED,
    ),
    # Nothing finer is known.
    "mixture": (
        *_LORA_BEFORE,
        Point("mlp", True, True, 0, 0, "up"),
        Point("mlp", True, False, 0, 0, "up"),
        *_LORA_AFTER,
    ),
}
# Of the product, beyond the layer's work: where the formula has its worst in another point, it is less by H.
_PRODUCT = {"lora, fused": -4.0, "full, four norms": -11.5, "lora, four norms": 2.0}
_STILL = {
    "full": (Point("down_proj.W", False, False, 0, 0, "kept"), Point("up_proj.W", True, False, -6, 2, "up")),
    "lora": (Point("down_proj.W", True, False, 0, 0), Point("down_proj.W", True, True, -4, 8)),
}


def points_of(shape: ModelShape, job: Job) -> tuple[Point, ...]:
    """Those of a layer of this model. Below ZeRO-3, where weights do not come and go, two of them are the worst."""
    method = "lora" if job.uses_lora else "full"
    if job.zero_stage < 3:
        return _STILL[method]
    kind = ", fused" if shape.fused else ", four norms" if shape.num_norms == 4 else ""
    return _shifted("mixture" if shape.experts else method + kind, is_reentrant(job))


@lru_cache(maxsize=16)
def _shifted(kind: str, reentrant: bool) -> tuple[Point, ...]:
    """Reentrant, a layer's forward is repeated before its backward begins, and leaves its output, 2H."""
    product, shift = _PRODUCT.get(kind, 0.0), 2 if reentrant else 0
    # Of two that begin together the later in the table holds.
    points = list({(point.module, point.enters, point.forward): point for point in POINTS[kind]}.values())
    ends = [_end(point) for point in points if point.gradients in ("down", "up") and kind != "mixture"]
    return tuple(
        replace(point, hiddens=point.hiddens + product + (-shift if point.forward else shift))
        for point in points + ends
    )


def _end(point: Point) -> Point:
    """What the backward of a projection of the MLP has been given is gone then, 2I a token or 4I."""
    return replace(point, mlps=point.mlps - (4 if point.module == "gate_up_proj.W" else 2), reduces=True)


def is_reentrant(job: Job) -> bool:
    """Whether checkpoints are: TRL has LoRA use such ones under ZeRO-3, in all trainers but the one for rewards."""
    return job.zero_stage == 3 and job.uses_lora and job.trainer != "reward" and job.checkpoint_every > 0
