"""A call to the pool: rules and rows as pickles, and the verdicts so far.

A worker's row holds an image's path and size instead of its pixels: a photo would be megabytes per row and rule, even
for rules that ignore images. A rule in the trainer's process gets the image.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from trl_ext.errors import DataError, RuleError
from trl_ext.rewards.base.rule import UNREAD, Row, Rule, Verdict


@dataclass(frozen=True, slots=True)
class Judged:
    """A row's verdict and its time.

    Args:
        ms: Milliseconds from the row's start on; 0.0 for a row that never began.
        failed: True if the machine or a server failed, so that a breaker counts the row.
        late: True if the row was stopped, or never began because others were: its rule gave no verdict.
    """

    verdict: Verdict
    ms: float
    failed: bool = False
    late: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A call's tasks, ready to be sent.

    Args:
        rules: Pickles of the different rules.
        rows: Of each task, the index of its rule and the row as a pickle that only a worker opens.
        floors: Of each task, its rule's floor.
        future: Gets the verdicts.
        judged: Verdicts so far, by the task's index.
        sends: Times that it was sent to a server; it is sent again if its server dies.
        late_at: When its server counts as dead (monotonic clock).
    """

    rules: list[bytes]
    rows: list[tuple[int, bytes]]
    floors: list[float]
    future: "Future[list[Judged]]"
    judged: dict[int, Judged] = field(default_factory=dict)
    sends: int = 0
    late_at: float = 0.0

    def open_rows(self) -> list[tuple[int, int, bytes]]:
        """Return index, rule's index and row of the tasks without a verdict."""
        return [(index, *row) for index, row in enumerate(self.rows) if index not in self.judged]

    def take(self, report: dict[str, Any]) -> bool:
        """Record a verdict; return True if no task is open."""
        index, value, status = report["row"], report["value"], report["status"]
        # A "timeout" from the rule, for instance of a program in its sandbox, has a value.
        is_late = (value, status) == ("floor", "timeout") or (status == "infra_error" and not report["machine"])
        value = self.floors[index] if value == "floor" else value
        self.judged[index] = Judged(Verdict(value, status, report["detail"]), report["ms"], report["machine"], is_late)
        return len(self.judged) == len(self.rows)

    def fail(self, detail: str) -> None:
        """Give the open rows no value, because the machine failed."""
        failure = {"value": None, "status": "infra_error", "detail": detail, "ms": 0.0, "machine": True}
        for index, _, _ in self.open_rows():
            self.take({"row": index, **failure})

    def results(self) -> list[Judged]:
        return [self.judged[index] for index in range(len(self.rows))]


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image without its pixels.

    Args:
        path: Its file; empty if the image is only in the trainer's memory.
        size: Width and height in pixels.
        mode: PIL's name of the pixel format, such as "RGB".
    """

    path: str
    size: tuple[int, int]
    mode: str

    def open(self) -> Any:
        if not self.path:
            raise RuleError(
                "This image has no file, and rules in workers get images by reference. Set tier = 'inline' in the "
                "rule, or keep the dataset's images as files."
            )
        from PIL import Image

        return Image.open(self.path)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, sys.modules["PIL.Image"].Image):
            return ImageReference, (str(getattr(thing, "filename", "") or ""), thing.size, thing.mode)
        return NotImplemented


def packed(tasks: Sequence[tuple[Rule, Row]], future: "Future[list[Judged]]") -> Request:
    """Return the tasks as a request, each rule once."""
    rules = {id(rule): rule for rule, _ in tasks}
    places = {key: place for place, key in enumerate(rules)}
    rows = []
    for index, (rule, row) in enumerate(tasks):
        if not rule.reads_group and row.group is not UNREAD:
            row = replace(row, group=UNREAD)  # Otherwise each row would carry the texts of all.
        rows.append((places[id(rule)], pickled_row(row, index)))
    floors = [float(rule.floor) for rule, _ in tasks]
    return Request([pickled_rule(rule) for rule in rules.values()], rows, floors, future)


def pickled_rule(rule: Rule) -> bytes:
    """Pickle a rule by its class's import path, or by value if a script or notebook defines the class."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(rule))
    except Exception as error:  # The fields' types may raise anything.
        raise RuleError(
            f"Rule '{rule.name}' cannot be sent to a worker: {type(error).__name__}: {error}. Give it plain fields, "
            "and make what does not pickle (locks, models, open files) inside score()."
        ) from error


def pickled_row(row: Row, index: int) -> bytes:
    """Pickle a row, each PIL image as an ImageReference; DataError if that fails."""
    buffer = io.BytesIO()
    pickler = _Pickler if "PIL.Image" in sys.modules else pickle.Pickler
    try:
        pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(row)
    except Exception as error:  # As above.
        raise DataError(
            f"Row {index} cannot be sent to a worker: {type(error).__name__}: {error}. Keep plain data in the prompts "
            "and columns that rules read."
        ) from error
    return buffer.getvalue()
