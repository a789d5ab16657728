"""Series of rules that are 0 in a healthy run: logged from the first time on that they are not."""

import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

# Shares of rows that went another way than usual, and workers that had to be started again.
_SHARE = re.compile(r"rules/.+_frac|rules/workers_restarted")


class RuleShares:
    """Knows which of these series a run has begun."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def resume(self, log_history: Iterable[Mapping[str, Any]]) -> None:
        """Go on with the series that a resumed run has logged."""
        self._begun |= {key for entry in log_history for key in entry if _SHARE.fullmatch(key.removeprefix("eval_"))}

    def drop_zeros(self, metrics: MutableMapping[str, list[float]], mode: str) -> None:
        """Take the series that were never anything but 0 out of TRL's metrics.

        Args:
            metrics: Values since the last entry, by name, the same on all ranks.
            mode: "train" or "eval", which have series of their own.
        """
        for key in [key for key in metrics if _SHARE.fullmatch(key)]:
            name = key if mode == "train" else f"eval_{key}"
            if any(metrics[key]):
                self._begun.add(name)
            elif name not in self._begun:
                del metrics[key]
