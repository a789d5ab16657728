"""Verdicts that are kept, so that a group's repeated answers are judged once. Thread-safe."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from trl_ext.rewards.rule import Verdict


class VerdictCache:
    """The verdicts asked for last.

    Args:
        size: Most verdicts that are kept.
    """

    def __init__(self, size: int = 50_000):
        self.size = size
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, Verdict] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Verdict | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, verdict: Verdict) -> None:
        """Keep a verdict; not one that the machine, and not the row, brought about."""
        if verdict.status in ("infra_error", "error"):
            return
        with self._lock:
            self._kept[key] = verdict
            self._kept.move_to_end(key)
            if len(self._kept) > self.size:
                self._kept.popitem(last=False)
