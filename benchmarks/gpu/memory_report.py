"""What the memory benchmark says of its rows: prediction, error, verdicts, summary."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.gpu import beside
from benchmarks.gpu.memory_rows import Row
from trl_ext.memory.units import GIB, gib

# What a row goes through: completions are given, so that nothing is generated.
PHASES = ("score", "update", "step")
COLUMNS = (
    "row",
    "ranks",
    "card",
    "formula",
    "measured",
    "error",
    "reserved",
    "measured",
    "error",
    "says",
    "is",
    "twin",
)


def predict(row: Row) -> dict[str, Any]:
    """The planner's answer without generation, which is left out in the run, too; `fits` on the imitated card."""
    found = beside.predict(row.shape, row.job, row.hardware, generates=False)
    return {**found, "fits": found["reserved"] <= row.hardware.fill_gib * GIB}


def record(row: Row, answer: Mapping[str, Any], twin: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A row of the JSON.

    Args:
        row: The configuration.
        answer: Of the worker and of the runner: `status`, and by status `allocated` and `reserved` (bytes by phase),
            `fits` (None if no card was imitated), `reason`.
        twin: Bytes by phase.
    """
    measured: dict[str, Any] = {kind: _most(answer.get(kind)) for kind in ("allocated", "reserved")}
    measured["seconds"] = beside.measured_seconds(answer.get("step_phases", {}), generates=False)
    held = beside.beside(predict(row), measured)
    twin_bytes = _most(twin)
    return {
        **row.as_dict(),
        "usable": round(row.hardware.fill_gib * GIB),
        **answer,
        **held,
        "twin": dict(twin) if twin else None,
        "error_pct": held["error_pct"] | {"twin": beside.error_pct(twin_bytes, measured["allocated"])},
    }


def _most(by_phase: Mapping[str, int] | None) -> int | None:
    return max((by_phase[phase] for phase in PHASES if phase in by_phase), default=None) if by_phase else None


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all rows that were begun: errors in percent, and verdicts."""
    begun = [one for one in records if "predicted" in one]
    verdicts = [(one["predicted"]["fits"], one["fits"]) for one in begun if one.get("fits") is not None]
    return {
        **{kind: _errors([one["error_pct"][kind] for one in begun]) for kind in ("allocated", "reserved", "twin")},
        "verdicts": len(verdicts),
        "false_fits": sum(says and not fits for says, fits in verdicts),
        "false_refusals": sum(fits and not says for says, fits in verdicts),
    }


def _errors(found: Sequence[float | None]) -> dict[str, float] | None:
    """Largest and median size of the error, and the worst prediction that was too low (0 if none was)."""
    known = [error for error in found if error is not None]
    if not known:
        return None
    sizes = [abs(error) for error in known]
    return {"max": max(sizes), "median": median(sizes), "too_low": max(0.0, -min(known)), "rows": len(known)}


# For the reader ----------------------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One line a row; GiB and percent."""
    shown = Table(title="Memory of one rank: allocated and reserved, GiB; error of the formula and of the twin, %")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("row", "card") else "right")
    for one in records:
        if "predicted" in one:
            shown.add_row(*_cells(one))
    return shown


def _cells(one: Mapping[str, Any]) -> list[str]:
    predicted, measured, errors = one["predicted"], one["measured"], one["error_pct"]
    cells = [one["row"], str(one["num_gpus"]), one["card"]]
    for kind in ("allocated", "reserved"):
        cells += [_gib(predicted[kind]), _gib(measured[kind]), _pct(errors[kind])]
    is_so = one["status"] if one.get("fits") is None else _fits(one["fits"])
    return [*cells, _fits(predicted["fits"]), is_so, _pct(errors["twin"])]


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{gib(num_bytes):.2f}"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _fits(fits: bool) -> str:
    return "fits" if fits else "no"


def sentences(total: Mapping[str, Any]) -> list[str]:
    """The summary in words."""
    said = [
        f"{total['measured']} of {total['rows']} rows measured, {total['skipped']} skipped, {total['failed']} failed, "
        f"{total['left']} left."
    ]
    for kind, words in (("allocated", "Allocated"), ("reserved", "Reserved"), ("twin", "The twin")):
        errors = total[kind]
        if errors:
            said.append(
                f"{words}: error at most {errors['max']:.1f} %, median {errors['median']:.1f} %, at most "
                f"{errors['too_low']:.1f} % too low, over {errors['rows']} rows."
            )
    if total["verdicts"]:
        said.append(
            f"{total['verdicts']} verdicts: {total['false_fits']} said to fit ran out of memory, "
            f"{total['false_refusals']} said not to fit did."
        )
    return said
