"""Running mean and standard deviation of totals, which can be merged over batches and ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

_LEAST_STD = 1e-4  # Values that hardly vary are not enlarged.


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of the values seen.

    Source of `merged`: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances (1979), equation 2.1.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Moments":
        known = list(values)
        if not known:
            return cls()
        mean = sum(known) / len(known)
        return cls(len(known), mean, sum((value - mean) ** 2 for value in known))

    def merged(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count, mean, self.squares + other.squares + delta**2 * self.count * other.count / count)

    @property
    def std(self) -> float:
        """Standard deviation of the sample; 1 for values that do not vary, and for fewer than two."""
        std = sqrt(self.squares / max(self.count - 1, 1))
        return std if std > _LEAST_STD else 1.0

    def normalised(self, value: float) -> float:
        """Return the value's distance from the mean in standard deviations; unchanged for fewer than two values."""
        return (value - self.mean) / self.std if self.count > 1 else value
