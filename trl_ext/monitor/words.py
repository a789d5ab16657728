"""Numbers as a person reads them: on the progress line, in the end table and in the report."""

from collections.abc import Iterable


def duration(seconds: float) -> str:
    """`2:10` or `1:02:10`, as a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def score(value: float | None) -> str:
    """A value of a curve with two decimals, never -0.00; a dash where there is none."""
    return "-" if value is None else f"{value:z.2f}"


def scores(named_values: Iterable[tuple[str, float]]) -> str:
    """`reward 0.42  answer 0.31  format 0.55`."""
    return "  ".join(f"{name} {score(value)}" for name, value in named_values)
