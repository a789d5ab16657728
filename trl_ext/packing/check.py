"""Self-check at start-up: does this model compute the same numbers packed as alone?

Three faults run without an error and give wrong numbers: layers that carry state along the row (Mamba, gated delta
nets, short convolutions), attention that ignores unknown keywords, and positions counted from the row instead of the
segment. So a few short rows go through the real model, alone and packed, and log-probabilities or scores are compared.
If the config names a short window or chunk, two rows are longer than it.

Half precision rounds each forward by its shape. So a neighbour's influence is measured between forwards of equal
shape, where it is exactly 0 in a correct model, and the error against each row alone is compared with
the error of padding.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

FLOAT32_TOLERANCE = 1e-4
# Errors below it are accepted in half precision: a missing prefix costs nats, not hundredths.
HALF_TOLERANCE = 0.03
# Rounding alone may move a single token by nats, where attention's sink just forms or just does not. So in half
# precision the largest differences are left out, packed and padded, and none of padding counts more than this.
_TRIMMED_FRAC, _MOST_OF_PADDING = 0.1, 0.25
# Packed rows of sound models, cut to 4 to 30 layers, differ by at most 3.7 times what padding differs by; a fault that
# moves positions by one differs by 4.4 times and more.
_TIMES_PADDING = 4.3

# A group that shares a prompt, a prompt of one token, a completion of one token, a single row; and a group with a
# prompt so long that its keys are not copied (`kernels.merging_pays`), for completions and for pairs.
_LONG_PROMPT = 40
_SHAPES = ((9, 5), (9, 1), (9, 7), (1, 4), (6, 3), (14, 6), *((_LONG_PROMPT, own) for own in (2, 1, 3, 2)))
# Fields of transformers' configs that bound how far a token sees, or cut a row into parts.
_WINDOWS = re.compile(r"window(?!_layers|_pattern)|chunk|block_size|local_attention|index_topk")
# Longer windows would make the check too slow on a CPU; attention reads them from transformers' masks.
_LONGEST_WINDOW = 600


@dataclass(frozen=True, slots=True)
class Probe:
    """One row of the check: token ids of prompt and completion."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


# Returns the numbers of each given row, [n] per row.
Numbers = Callable[[list[Probe]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The distance between packed numbers and each row's numbers alone.

    Args:
        error: Root mean square difference, the larger one of two plans.
        leak: Largest change of the other rows' numbers when some rows' tokens are replaced.
        tolerance: For the error. In half precision three times the root mean square error of padding.
        leak_tolerance: For the leak. Larger than in float32 only if rows change each other in a padded batch too.
        failure: The exception that stopped the check, as text; "" if it ran.
        what: The compared numbers: log-probabilities in nats, or scores.
        alone: The numbers of each row alone, concatenated.
    """

    error: float
    leak: float
    tolerance: float
    leak_tolerance: float = FLOAT32_TOLERANCE
    failure: str = ""
    what: str = "log-probabilities"
    alone: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    @property
    def is_exact(self) -> bool:
        return not self.failure and self.error <= self.tolerance and self.leak <= self.leak_tolerance

    def __str__(self) -> str:
        if self.failure:
            return f"the packed forward stopped with {self.failure}"
        return (
            f"{self.what} differ by {self.error:.1e} from each row alone, tolerance {self.tolerance:.1e}, "
            f"and change by {self.leak:.1e} when a neighbour's tokens change, tolerance {self.leak_tolerance:.1e}"
        )

    def why_not(self, plain: "CheckResult") -> str:
        """Return why layers replaced since the check `plain` compute other numbers; "" if they do not."""
        if not self.is_exact:
            return str(self)
        sizes = (self.alone - plain.alone).abs().nan_to_num(nan=torch.inf).sort().values
        error = _rms(_trim(sizes, half_precision=plain.tolerance > FLOAT32_TOLERANCE))
        if error <= plain.tolerance:
            return ""
        return f"{self.what} of rows alone differ by {error:.1e} from those before, tolerance {plain.tolerance:.1e}"


def probes(vocab_size: int, window: int = 0, seed: int = 0) -> list[Probe]:
    """Return the rows of the check: random tokens below `vocab_size`, equal on every rank.

    No two prompts, and no two completions, begin with the same token or with neighbours in the vocabulary: rows with
    replaced tokens share as many tokens as before. If `window` is not 0, two more rows have a common prompt longer
    than it.
    """
    draw = random.Random(seed)
    shapes = (*_SHAPES, (window + 2, 7), (window + 2, 4)) if window else _SHAPES
    first_tokens = count(draw.randrange(vocab_size), 3)
    prompts: dict[int, tuple[int, ...]] = {}

    def tokens(length: int) -> tuple[int, ...]:
        return next(first_tokens) % vocab_size, *(draw.randrange(vocab_size) for _ in range(length - 1))

    return [Probe(prompts.get(p) or prompts.setdefault(p, tokens(p)), tokens(c)) for p, c in shapes]


def longest_window(config: Any) -> int:
    """Return the longest window or chunk in a model's config that the check's rows can exceed; 0 if there is none."""
    fields = [value for name, value in config.to_dict().items() if _WINDOWS.search(name)]
    values = [one for field in fields for one in (field if isinstance(field, list) else [field])]
    positions = getattr(config, "max_position_embeddings", None)
    most = _LONGEST_WINDOW if not isinstance(positions, int) else min(_LONGEST_WINDOW, positions - 9)
    return max((one for one in values if type(one) is int and 0 < one <= most), default=0)


def check(
    alone: Callable[[Probe], torch.Tensor],
    padded: Numbers,
    packed: Numbers,
    config: Any,
    half_precision: bool,
    what: str = "log-probabilities",
) -> CheckResult:
    """Compare packed rows with rows alone. Collective under ZeRO-3: every rank makes the same forwards.

    Args:
        alone: Returns the numbers of one row, forwarded without padding, such as its tokens' log-probabilities.
        padded: The same for several rows in one padded batch, to measure the model's usual rounding.
        packed: The same for several rows in one flat forward.
        config: Config of the model's text part: its vocabulary, and windows to exceed.
        half_precision: Allow for the rounding of bfloat16, float16 or TF32.
        what: Name of the numbers in the message.
    """
    rows = probes(config.vocab_size, longest_window(config))
    # Without the long prompt keys are copied, so that both kernels are tested.
    short = [row for row in rows if len(row.prompt) != _LONG_PROMPT]
    tolerance, leak_tolerance = FLOAT32_TOLERANCE, FLOAT32_TOLERANCE
    errors, leaks = [], []
    try:
        with torch.no_grad():
            reference = {row: alone(row).float() for row in rows}

            def compared(numbers: Numbers, tried: list[Probe]) -> tuple[torch.Tensor, float]:
                """Return the absolute differences to rows alone, [n] ascending, and the leak."""
                found = dict(zip(tried, numbers(tried), strict=True))
                differences = torch.cat([found[row].float() - reference[row] for row in tried])
                sizes = differences.abs().nan_to_num(nan=torch.inf).sort().values
                return sizes, _largest_change(found, numbers, config.vocab_size)

            if half_precision:
                of_padding, change = compared(padded, rows)
                of_most = _trim(of_padding, half_precision).clamp(max=_MOST_OF_PADDING)
                tolerance = max(HALF_TOLERANCE, _TIMES_PADDING * _rms(of_most))
                # Padded rows cannot leak, but a mixture's experts may round by their number of tokens.
                if change > 0:
                    leak_tolerance = max(leak_tolerance, 3 * of_padding[-1].item())
            for tried in (rows, short):
                sizes, leak = compared(packed, tried)
                errors.append(_rms(_trim(sizes, half_precision)))
                leaks.append(leak)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OSError, ImportError) as error:
        # Any exception of a foreign model on a packed row, or of a hub kernel that cannot be loaded, means that this
        # model cannot be packed.
        failure = f"{type(error).__name__}: {error}"
        return CheckResult(float("nan"), float("nan"), tolerance, failure=failure, what=what)
    numbers_alone = torch.cat(list(reference.values()))
    return CheckResult(max(errors), max(leaks), tolerance, leak_tolerance, what=what, alone=numbers_alone)


def _largest_change(found: dict[Probe, torch.Tensor], numbers: Numbers, vocab_size: int) -> float:
    """Return the largest change of rows' numbers when other rows' tokens are replaced, in forwards of equal shape.

    Replaced are the first row's completion, which no other row may see; the whole first group, which no other group
    may see; the last row's completion, which no earlier row may see. `found` has the numbers before.
    """

    def other(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((token + 1) % vocab_size for token in tokens)

    rows = list(found)
    first, last = rows[0], rows[-1]
    group = {row: Probe(other(row.prompt), other(row.completion)) for row in rows if row.prompt == first.prompt}
    ends = [{row: Probe(row.prompt, other(row.completion))} for row in (first, last)]
    changes = []
    for replaced in (*ends, group):
        changed = dict(zip(rows, numbers([replaced.get(row, row) for row in rows]), strict=True))
        changes += [(found[row] - changed[row]).abs().max() for row in rows if row not in replaced]
    return torch.stack(changes).nan_to_num(nan=torch.inf).max().item()


def _trim(sizes: torch.Tensor, half_precision: bool) -> torch.Tensor:
    """Return the sorted differences, in half precision without the largest."""
    is_kept = not half_precision or not sizes.isfinite().all()
    return sizes if is_kept else sizes[: -max(int(_TRIMMED_FRAC * len(sizes)), 1)]


def _rms(sizes: torch.Tensor) -> float:
    return sizes.square().mean().sqrt().item()
