"""pass@k of a set of problems, with a 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean

_Z = NormalDist().inv_cdf(0.975)
WILSON = "Wilson, 95 %"
BOOTSTRAP = "bootstrap over problems, 95 %"
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class ShareEstimate:
    """A share of problems between 0 and 1, with the interval that it lies in.

    Args:
        value, low, high: The share and the ends of its interval.
        num_problems: Problems that the share is of.
        method: How the interval was made.
    """

    value: float
    low: float
    high: float
    num_problems: int
    method: str

    def as_dict(self) -> dict[str, float | int | str]:
        """Return the fields, for JSON."""
        return asdict(self)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the chance that one of k samples is right, estimated without bias from n >= k samples of a problem.

    Source: arXiv:2107.03374, equation 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, and `most` itself."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def estimate(counts: Sequence[tuple[int, int]], k: int) -> ShareEstimate | None:
    """Return pass@k over problems; None where no problem has k samples.

    One sample a problem gives Wilson's interval. Several give percentiles of the mean over problems that are drawn
    again with replacement; where all problems are alike these would be one point, and Wilson's interval, which is
    wider than it has to be for shares, stands in.

    Args:
        counts: Samples and right samples of each problem.
        k: Samples that one of must be right.

    Source: Wilson, JASA 22 (1927) 209; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    shares = [pass_at_k(num, right, k) for num, right in counts if num >= k]
    if not shares:
        return None
    value = fmean(shares)
    if max(num for num, _ in counts) == 1 or min(shares) == max(shares):
        return ShareEstimate(value, *wilson(value, len(shares)), len(shares), WILSON)
    import numpy as np

    values, times = np.unique(shares, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(shares), times / len(shares), size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / len(shares), [2.5, 97.5])
    return ShareEstimate(value, float(low), float(high), len(shares), BOOTSTRAP)


def wilson(share: float, num: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval for a share of `num` trials."""
    scale = 1 + _Z**2 / num
    middle = (share + _Z**2 / (2 * num)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)
