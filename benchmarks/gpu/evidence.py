"""Puts what cards have measured into the tables of docs/reference/evidence.md, from the results that are committed.

    python -m benchmarks.gpu.evidence

Rows that no card has measured stand there, too, and say so.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import exact, kernels, memory_rows, prof, quickstart, runner, speed_rows
from trl_ext.memory.units import gib

PAGE = runner.ROOT / "docs" / "reference" / "evidence.md"
NOT_YET = "not measured yet"
PARTS: Mapping[str, Any] = {"prof": prof, "kernels": kernels, "quickstart": quickstart}
ROWS: Mapping[str, Sequence[Any]] = {
    "exact": exact.all_rows(),
    "speed": speed_rows.rows("full", None, None),
    "memory": memory_rows.ROWS,
    **{name: [SimpleNamespace(name=row) for row in part.NAMES] for name, part in PARTS.items()},
}
HEADS = {"exact": ("tests", "card", "passed", "failed", "skipped", "what it is")}
HEADS |= dict.fromkeys(PARTS, ("row", "card", "measured"))
HELD = ("row", "card", "allocated, GiB", "reserved, GiB", "generation, s", "scoring, s", "update, s")
HELD += ("tokens/s", "(verl)", "MFU", "MFU (verl)", "ours faster: step, update", "what it is")


def results_of(part: str, folder: Path) -> list[Mapping[str, Any]]:
    """The results of a part that come from a card, one for each file `gpu_PART*.json`."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"gpu_{part}*.json"))]
    return [one for one in found if one["basis"] == runner.MEASURED and one["scale"] == "full"]


def table(part: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A line for every row and each card that has measured it, or has run out of memory or time in it."""
    head = HEADS.get(part, HELD)
    lines = [head, ["---"] * len(head)]
    for row in ROWS[part]:
        known = [(result, one) for result in results for one in result["rows"] if one["row"] == row.name]
        known = [(result, one) for result, one in known if one["status"] in runner.FINAL]
        lines += [_cells(part, result, one) for result, one in known]
        if not known:
            lines.append([f"`{row.name}`", NOT_YET, *[""] * (len(head) - 2)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(part: str, result: Mapping[str, Any], one: Mapping[str, Any]) -> list[str]:
    born = result["machine"]["card"] + (f", commit `{result['commit']}`" if result.get("commit") else "")
    first = [f"`{one['row']}`" + (f", {one['scale']}" if one.get("scale") else ""), born]
    if one["status"] != "measured":
        first[1] += f": {one['status']}"
        return [*first, *[""] * (len(HEADS.get(part, HELD)) - 2)]
    if part == "exact":
        return [*first, str(one["passed"]), *(str(len(one[f"{kind}_tests"])) for kind in HEADS[part][3:5]), about(one)]
    if part in PARTS:
        return [*first, one["says"]]
    planned, real = one["predicted"], one["measured"]
    cells = [_pair(gib(planned[kind]), real[kind] and gib(real[kind])) for kind in ("allocated", "reserved")]
    for name in ("generation", "scoring", "update"):
        cells.append(_pair(planned["seconds"].get(name), real["seconds"].get(name)))
    cells += [f"{one[name]:,}" if one.get(name) else "" for name in ("tokens_per_s", "tokens_per_s_verl")]
    cells += [f"{one[name]:.0%}" if one.get(name) else "" for name in ("mfu", "mfu_verl")]
    faster = result["summary"].get("faster_than", {}).get(one["row"])
    return [*first, *cells, "{step:.2f}, {update:.2f} times".format(**faster) if faster else "", about(one)]


def about(one: Mapping[str, Any]) -> str:
    """What has to be known of a row to read its figures."""
    layout = [] if "packed" not in one else ["packed" if one["packed"] else "padded"]
    retries = [f"{one['retries']} retries of the allocator"] if one.get("retries") else []
    return "; ".join([*layout, *retries, *(one[key] for key in ("published", "note") if one.get(key))])


def _pair(planned: float | None, measured: float | None) -> str:
    """Planned and measured; nothing where nothing was measured."""
    return "" if not measured else f"{'?' if planned is None else f'{planned:.2f}'} / {measured:.2f}"


def filled(page: str, folder: Path = runner.RESULTS) -> str:
    """The page with today's tables between its markers."""
    for part in ROWS:
        begin, end = f"<!-- card: {part} -->\n\n", "\n<!-- end -->"
        found = f"{begin}{table(part, results_of(part, folder))}{end}"
        page = re.sub(f"{begin}.*?{end}", lambda match, found=found: found, page, count=1, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
