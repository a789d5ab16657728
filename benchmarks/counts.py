"""Counts that a benchmark found, as a table and as a file."""

from collections.abc import Mapping
from pathlib import Path

from machine import write
from rich.console import Console
from rich.table import Table


def show_counts(benchmark: str, found: Mapping[str, Mapping[str, int]], output: Path | None) -> None:
    """Print counts by what was measured, and save them where `output` says."""
    table = Table("measured", "counts")
    for name, figures in found.items():
        table.add_row(name, ", ".join(f"{key} {value:,}" for key, value in figures.items()))
    Console().print(table)
    if output:
        write(output, {"benchmark": benchmark, **found})
