"""The start-up self-check: does this model give the same numbers packed as alone?

Layers that carry state along the row (Mamba, gated delta nets, short convolutions), attention that ignores unknown
keywords, and positions counted from the row instead of the segment all run without an error, and are wrong. So a few
short rows go through the real model, alone and packed, and the log-probabilities or scores are compared. Where the
config names a short window or chunk, two rows go beyond it.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLOAT32_TOLERANCE = 1e-4
# Below it half precision is not looked at more closely: a prefix that is missed costs nats, not hundredths.
HALF_TOLERANCE = 0.03

# A group that shares a prompt, a prompt of one token, a completion of one token, a lone row; and a group behind a
# prompt so long that its keys are not copied (`kernels.merging_pays`), for completions and for pairs.
_LONG_PROMPT = 40
_SHAPES = ((9, 5), (9, 1), (9, 7), (1, 4), (6, 3), (14, 6), *((_LONG_PROMPT, own) for own in (2, 1, 3, 2)))
# Fields of transformers' configs that bound how far a token sees, or cut a row into parts.
_WINDOWS = re.compile(r"window(?!_layers|_pattern)|chunk|block_size|local_attention|index_topk")
# Longer windows would make the check too slow on a CPU; attention takes them from transformers' own masks.
_LONGEST_WINDOW = 600


@dataclass(frozen=True, slots=True)
class Probe:
    """One row of the check: token ids of prompt and completion."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How far packed numbers are from those of each row alone.

    Args:
        what: The numbers that are compared: log-probabilities in nats, or scores and what they are made from.
        error: Root mean square difference over all of them.
        leak: Largest change of the other rows' numbers when one row's tokens are replaced.
        tolerance: Both must stay below it. In half precision: three times the error that padding makes.
        failure: The exception that stopped the check, as text; empty when it ran.
    """

    error: float
    leak: float
    tolerance: float
    failure: str = ""
    what: str = "log-probabilities"

    @property
    def is_exact(self) -> bool:
        return not self.failure and self.error <= self.tolerance and self.leak <= self.tolerance

    def __str__(self) -> str:
        if self.failure:
            return f"the packed forward stopped with {self.failure}"
        return (
            f"{self.what} differ by {self.error:.1e} from those of each row alone and change by {self.leak:.1e} "
            f"when a neighbour's tokens change, tolerance {self.tolerance:.1e}"
        )


def probes(vocab_size: int, window: int = 0, seed: int = 0) -> list[Probe]:
    """The rows of the check: random tokens, equal on every rank.

    Args:
        vocab_size: Tokens are drawn below it.
        window: Two more rows go beyond so many tokens, with their common prompt and behind it; 0 for none.
        seed: Of the tokens.
    """
    draw = random.Random(seed)
    shapes = (*_SHAPES, (window + 2, 7), (window + 2, 4)) if window else _SHAPES
    prompts: dict[int, tuple[int, ...]] = {}

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(count))

    return [Probe(prompts.setdefault(p, tokens(p)), tokens(c)) for p, c in shapes]


def longest_window(config: Any) -> int:
    """Return the longest window or chunk that a model's config names and that the check can go beyond; 0 for none."""
    fields = [value for name, value in config.to_dict().items() if _WINDOWS.search(name)]
    values = [one for field in fields for one in (field if isinstance(field, list) else [field])]
    positions = getattr(config, "max_position_embeddings", None)
    most = _LONGEST_WINDOW if not isinstance(positions, int) else min(_LONGEST_WINDOW, positions - 9)
    return max((one for one in values if type(one) is int and 0 < one <= most), default=0)


def check(
    alone: Callable[[Probe], torch.Tensor],
    padded: Callable[[list[Probe]], list[torch.Tensor]],
    packed: Callable[[list[Probe]], list[torch.Tensor]],
    config: Any,
    half_precision: bool,
    what: str = "log-probabilities",
) -> CheckResult:
    """Compare the two ways on a few rows. Collective under ZeRO-3: every rank makes the same forwards.

    Args:
        alone: The numbers of one row, forwarded by itself without padding: its tokens' log-probabilities, say.
        padded: The same for several rows in one padded batch: how much rounding is usual for this model.
        packed: The same for several rows in one flat forward.
        config: The model's, of its text part: tokens are of its vocabulary, and rows go beyond its windows.
        half_precision: Allow for bfloat16 or float16 rounding.
        what: What the numbers are, for the message.
    """
    vocab_size = config.vocab_size
    rows = probes(vocab_size, longest_window(config))
    # The neighbour that changes stands first, so that whatever leaks reaches all that follow.
    changed = [Probe(rows[0].prompt, tuple((t + 1) % vocab_size for t in rows[0].completion)), *rows[1:]]
    tolerance = FLOAT32_TOLERANCE
    try:
        with torch.no_grad():
            reference = torch.cat([alone(row) for row in rows]).float()
            if half_precision:
                tolerance = max(HALF_TOLERANCE, 3 * _rms(torch.cat(padded(rows)) - reference))
            before = packed(rows)
            # Without the long prompt keys are copied, so that both kernels are tried.
            short = [number for number, row in enumerate(rows) if len(row.prompt) != _LONG_PROMPT]
            after = packed([changed[number] for number in short])
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OSError, ImportError) as error:
        # Whatever a foreign model raises on a packed row means the same: this model cannot be packed. So does a
        # kernel that the hub does not give.
        return CheckResult(float("nan"), float("nan"), tolerance, f"{type(error).__name__}: {error}", what)
    of_others = zip(short[1:], after[1:], strict=True)
    leak = max((before[number] - numbers).abs().max().item() for number, numbers in of_others)
    return CheckResult(_rms(torch.cat(before) - reference), leak, tolerance, what=what)


def _rms(difference: torch.Tensor) -> float:
    return difference.float().square().mean().sqrt().item()
