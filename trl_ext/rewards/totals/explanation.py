"""An explanation of one completion's total, as a table for people."""

from dataclasses import dataclass

from trl_ext.rewards.base.rule import Rule, Verdict

_HEADINGS = ("rule", "value", "status", "weight", "gated", "adds", "detail")


@dataclass(frozen=True, slots=True)
class Part:
    """One rule's line: its verdict, and the amount that it adds to the total (None if it is left out)."""

    rule: str
    value: float | None
    status: str
    weight: float
    gated: bool
    contribution: float | None
    detail: str

    @classmethod
    def of(cls, rule: Rule, verdict: Verdict, gate_state: str, contribution: float | None) -> "Part":
        """Make the line; a gate that is not open gives the status `gated`, and the value stays the rule's."""
        gated = gate_state != "open"
        detail = f"gate '{rule.gate}' is {gate_state}; {verdict.detail}" if gated else verdict.detail
        status = "gated" if gated else verdict.status
        return cls(rule.name, verdict.value, status, rule.weight, gated, contribution, detail)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One completion's total and its parts. `print(rules.explain(...))` gives:

    rule    value  status  weight  gated  adds    detail
    answer  1.000  ok      1       no     +1.000  'A:': 18; gold whole text: 18
    length  0.500  ok      0.1     no     +0.050  530 tokens
    total   1.050
    """

    parts: tuple[Part, ...]
    total: float | None
    clip: tuple[float, float] | None = None

    def __str__(self) -> str:
        clip = f"clip {self.clip[0]:g}..{self.clip[1]:g}" if self.clip else ""
        lines = [_HEADINGS, *map(_cells, self.parts), ("total", _number(self.total, ""), clip)]
        widths = [
            max(len(line[column]) for line in lines if len(line) > column) for column in range(len(_HEADINGS) - 1)
        ]
        widths[2] = max(len(line[2]) for line in lines[:-1])  # The note on the clip may cover the next columns.
        padded = [[cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=False)] for line in lines]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _cells(part: Part) -> tuple[str, ...]:
    adds = _number(part.contribution, "+")
    gated, detail = "yes" if part.gated else "no", " ".join(part.detail.split())
    return part.rule, _number(part.value, ""), part.status, f"{part.weight:g}", gated, adds, detail


def _number(value: float | None, sign: str) -> str:
    return "none" if value is None else f"{value:{sign}.3f}"


def shortened(text: str, width: int = 160) -> str:
    """Return the text on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."
