"""Whether a sampler has the weights that were pushed to it, by log-probabilities that are there anyway."""

from typing import Any

import torch

from trl_ext.errors import SamplerError

LOGIT_DIFFERENCE = "sampling/logit_difference"
# A run ends when the difference is NUM_TIMES that of its first samples in PATIENCE optimizer steps in a row. A lost
# push gave 13 times the first difference in step 3 (TRL's issue 5312); in the healthy runs of the tests it stays below
# 2.1 times. Differences below SMALLEST do no harm.
NUM_TIMES, PATIENCE, SMALLEST = 3.0, 3, 0.05


def compared(logps: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Return [2]: the sum of the differences of log-probabilities, and of how uncertain the sampler was.

    An error of a logit moves the log-probability of its token by 1 - p of it, where p is the token's probability. So
    the quotient of the sums is about the error of the logits, however sure the policy becomes of its tokens.

    Args:
        logps: [T] the trainer's log-probabilities of sampled tokens, with the weights that were pushed last.
        sampled: [T] the sampler's own; NaN where it gave none.
    """
    difference = (logps.detach() - sampled).abs().float()
    return torch.stack([difference.nansum(), -torch.expm1(sampled.float()).nansum()])


class PushWatch:
    """Ends a run whose sampler keeps old weights: the trainer's then part from them, more with every update.

    Samples that are old by design differ as well. Their difference is no larger than the first one of samples as old
    after updates as large, so while age or learning rate grow, the difference that is allowed is the largest so far.
    """

    def __init__(self) -> None:
        self._reference, self._largest_move, self._num_far = 0.0, -1.0, 0

    def look(self, sums: torch.Tensor, move: float | None, state: Any, metrics: dict[str, list[float]]) -> None:
        """Log the difference of an optimizer step's samples, and compare it with the first.

        Args:
            sums: [2] from `compared`, over the step's samples on all ranks.
            move: How far the policy may have moved by design since the weights that sampled were pushed: learning rate
                times updates; 0 if it has not; None if that is not known: the difference is logged and not judged.
            state: The trainer's, whose log has the first difference of a resumed run.
            metrics: What the trainer logs next.

        Raises:
            SamplerError: The sampler does not have the weights.
        """
        difference, uncertainty = sums.tolist()
        if not uncertainty:
            return
        difference /= uncertainty
        metrics[LOGIT_DIFFERENCE].append(difference)
        if move is None:
            return
        if move > self._largest_move:
            logged = (entry[LOGIT_DIFFERENCE] for entry in state.log_history if LOGIT_DIFFERENCE in entry)
            own = difference if move else next(logged, difference)
            self._reference, self._largest_move = max(own, self._reference), move
        is_far = difference > max(SMALLEST, NUM_TIMES * self._reference)
        self._num_far = self._num_far + 1 if is_far else 0
        if self._num_far >= PATIENCE:
            raise SamplerError(
                f"The weights that are pushed to vLLM do not seem to arrive there. In the last {PATIENCE} optimizer "
                f"steps its logits differ from the trainer's by {difference:.2g} on average, and by "
                f"{self._reference:.2g} when both had the same weights. Start vLLM again, without sleep mode or in "
                "another version, and resume from a checkpoint."
            )
