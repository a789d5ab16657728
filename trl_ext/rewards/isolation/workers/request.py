"""A call to the pool on its way: rules and rows as pickles, and the verdicts that have come back.

A row that goes to a worker takes an image's path and size along, not its pixels: copied, a photo is megabytes a row,
for each rule in a worker, whether it looks at images or not. A rule in the trainer's process finds the image itself.
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
    """A row's verdict and what it took.

    Args:
        verdict: The verdict.
        ms: Milliseconds from the row's start on; 0.0 for a row that never began.
        failed: True where the machine or a server failed, so that a breaker counts the row.
        late: True where the row was stopped, or never began since others had to be: its rule gave no verdict.
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
        rows: For each task the place of its rule, and its row as a pickle that only a worker opens.
        floors: For each task its rule's floor.
        future: Where the verdicts go.
        judged: Task's index: what has come back.
        sends: Times that it went to a server; a server that dies takes its requests along.
        late_at: When its server is taken for dead (monotonic clock).
    """

    rules: list[bytes]
    rows: list[tuple[int, bytes]]
    floors: list[float]
    future: "Future[list[Judged]]"
    judged: dict[int, Judged] = field(default_factory=dict)
    sends: int = 0
    late_at: float = 0.0

    def open_rows(self) -> list[tuple[int, int, bytes]]:
        """Index, place of the rule, and row of the tasks without a verdict."""
        return [(index, *row) for index, row in enumerate(self.rows) if index not in self.judged]

    def take(self, report: dict[str, Any]) -> bool:
        """Note a verdict; True when none is open any more."""
        index, value, status = report["row"], report["value"], report["status"]
        # A rule's own "timeout", such as that of a program in its sandbox, comes with a value.
        is_late = (value, status) == ("floor", "timeout") or (status == "infra_error" and not report["machine"])
        value = self.floors[index] if value == "floor" else value
        self.judged[index] = Judged(Verdict(value, status, report["detail"]), report["ms"], report["machine"], is_late)
        return len(self.judged) == len(self.rows)

    def fail(self, detail: str) -> None:
        """Give the open rows no value, through the machine's fault."""
        failure = {"value": None, "status": "infra_error", "detail": detail, "ms": 0.0, "machine": True}
        for index, _, _ in self.open_rows():
            self.take({"row": index, **failure})

    def results(self) -> list[Judged]:
        """The verdicts, in the order of the tasks."""
        return [self.judged[index] for index in range(len(self.rows))]


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image that lies elsewhere.

    Args:
        path: Its file; empty where the image is only in the trainer's memory.
        size: Width and height in pixels.
        mode: Of its pixels, as PIL names it, such as "RGB".
    """

    path: str
    size: tuple[int, int]
    mode: str

    def open(self) -> Any:
        """The image, read from its file."""
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
    """The tasks as a request, each rule once."""
    rules = {id(rule): rule for rule, _ in tasks}
    places = {key: place for place, key in enumerate(rules)}
    rows = []
    for index, (rule, row) in enumerate(tasks):
        if not rule.reads_group and row.group is not UNREAD:
            row = replace(row, group=UNREAD)  # Copied, each row would carry the texts of all.
        rows.append((places[id(rule)], pickled_row(row, index)))
    floors = [float(rule.floor) for rule, _ in tasks]
    return Request([pickled_rule(rule) for rule in rules.values()], rows, floors, future)


def pickled_rule(rule: Rule) -> bytes:
    """The rule by its class's import path, or by value where the class is in the script or notebook that is run."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(rule))
    except Exception as error:  # Pickling calls into the fields' types, which may raise anything.
        raise RuleError(
            f"Rule '{rule.name}' cannot be sent to a worker: {type(error).__name__}: {error}. Give it plain fields, "
            "and make what does not pickle (locks, models, open files) inside score()."
        ) from error


def pickled_row(row: Row, index: int) -> bytes:
    """The row as a pickle in which each PIL image is an ImageReference, or DataError."""
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
