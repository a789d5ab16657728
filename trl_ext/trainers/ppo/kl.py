"""KL penalty: per-token estimates, and the coefficient they are weighted with. Legend: B rows, T completion tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

import torch

from trl_ext.errors import ConfigError

ESTIMATORS = ("k1", "k3")
_MOST_ERROR = 0.2  # Ziegler et al. bound the relative error of one update to this on either side.


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(policy || reference) from tokens that the policy sampled; both are unbiased.

    Args:
        logps, ref_logps: [B, T] log-probabilities of the tokens under the policy and the reference.
        estimator: "k1" is the log-ratio, of either sign; "k3" is never negative and mostly varies less.

    Returns:
        [B, T] in float32, nats.

    Raises:
        ConfigError: for another estimator.

    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"kl_estimator is {estimator!r}. Give one of {', '.join(ESTIMATORS)}.")
    log_ratio = ref_logps.float() - logps.float()
    # expm1: near the reference the two terms of exp(x) - 1 cancel, and the rest would be rounding.
    return -log_ratio if estimator == "k1" else torch.expm1(log_ratio) - log_ratio


@dataclass(slots=True)
class AdaptiveKL:
    """The KL coefficient, moved so that the policy keeps a given distance from the reference.

    Args:
        value: The coefficient now.
        target: Wanted KL of a whole completion, in nats; None keeps the coefficient fixed.
        horizon: Episodes over which a KL that is 20 % or more off moves the coefficient by about 20 %.

    Raises:
        ConfigError: for values that no coefficient can follow.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ConfigError(f"The KL coefficient is {self.value}. Give 0 or more.")
        if self.target is None:
            return
        if not self.target > 0:
            raise ConfigError(f"The KL target is {self.target}. Give more than 0, or None for a fixed coefficient.")
        if not self.horizon > 0:
            raise ConfigError(f"The KL horizon is {self.horizon}. Give more than 0 episodes.")
        if self.value == 0:
            raise ConfigError("A KL coefficient of 0 cannot adapt: each update multiplies it. Start above 0.")

    def update(self, kl: float, num_episodes: int) -> None:
        """Move the coefficient after a batch; a NaN KL, of a batch in which nothing counts, moves nothing.

        Args:
            kl: Mean over the completions of all ranks of the KL summed over their tokens.
            num_episodes: Completions of all ranks.
        """
        if self.target is None:
            return
        if _MOST_ERROR * num_episodes >= self.horizon:
            raise ConfigError(
                f"One update of {num_episodes} episodes can bring the KL coefficient to 0 or below with a horizon "
                f"of {self.horizon}. Give a horizon above {_MOST_ERROR * num_episodes:g}."
            )
        error = float(kl) / self.target - 1
        if not isnan(error):
            self.value *= 1 + min(max(error, -_MOST_ERROR), _MOST_ERROR) * num_episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self.value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved coefficient; a fixed one is a setting, not a state, and stays as it was set."""
        if self.target is not None:
            self.value = float(state["value"])
