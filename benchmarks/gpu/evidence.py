"""Puts what cards have measured into the tables of docs/reference/evidence/cards.md and the READMEs, from the results
that are committed.

    python -m benchmarks.gpu.evidence

Rows that no card has measured stand there, too, and say so.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import exact, kernels, memory_rows, prof, quickstart, runner, speed_rows
from trl_ext.memory.units import gib

PAGE = runner.ROOT / "docs" / "reference" / "evidence" / "cards.md"
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
RATES = ("tokens/s", "(verl)", "MFU", "MFU (verl)", "ours faster: update", "step", "with generation", "what it is")
HEADS |= {"memory": (*HELD, "what it is"), "speed": HELD + RATES}
NOT = "not measured"
READMES = ("README.md", "README_zh.md")


def results_of(part: str, folder: Path) -> list[Mapping[str, Any]]:
    """The results of a part that come from a card, one for each file `gpu_PART*.json`."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"gpu_{part}*.json"))]
    return [one for one in found if one["basis"] == runner.MEASURED and one["scale"] == "full"]


def table(part: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A line for every row and each card that has measured it, or has run out of memory or time in it."""
    head = HEADS[part]
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
        return [*first, *[""] * (len(HEADS[part]) - 2)]
    if part == "exact":
        return [*first, str(one["passed"]), *(str(len(one[f"{kind}_tests"])) for kind in HEADS[part][3:5]), about(one)]
    if part in PARTS:
        return [*first, one["says"]]
    planned, real = one["predicted"], one["measured"]
    cells = [_pair(gib(planned[kind]), real[kind] and gib(real[kind])) for kind in ("allocated", "reserved")]
    for name in ("generation", "scoring", "update"):
        cells.append(_pair(planned["seconds"].get(name), real["seconds"].get(name)))
    if part == "speed":
        cells += [f"{one[name]:,}" if one.get(name) else "" for name in ("tokens_per_s", "tokens_per_s_verl")]
        cells += [f"{one[name]:.0%}" if one.get(name) else "" for name in ("mfu", "mfu_verl")]
        # How much ours is faster stands in the lines of the others.
        others = not one["row"].endswith(f"/{speed_rows.OURS}")
        cells += times(result, one["row"]) if others else ["", "", ""]
    by_way = result["summary"].get("faster_by", {}).get(one["row"])
    words = [f"{by_way['update']:.2f} times the speed of the default's update"] if by_way else []
    return [*first, *cells, "; ".join([about(one), *words])]


def times(result: Mapping[str, Any], row: str) -> list[str]:
    """How many times faster ours is: the update, the step that is given its completions, and that with generation."""
    faster = result["summary"].get("faster_than", {})
    kind, _, shape = row.partition("/")
    here, whole = faster.get(row, {}), faster.get(f"step/{shape}", {})
    without = here.get("step") if kind != "step" else faster.get(f"update/{shape}", {}).get("step")
    return [NOT if found is None else f"{found:.2f}" for found in (here.get("update"), without, whole.get("step"))]


def readme_filled(page: str, folder: Path = runner.RESULTS) -> str:
    """A README with today's figures: in its table words that name a shape, <!-- tail -->, have a line for each card.

    What its marker names stands where nothing was measured.
    """
    found = re.search(r"<!-- card: speed, (.*?) -->\n\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert found
    head, rule, *old = found[2].splitlines()
    words = {shape[1]: line.split(" | ")[0] for line in old if (shape := re.search("<!-- (.*?) -->", line))}
    lines = [head, rule]
    for result, (shape, first) in product(results_of("speed", folder), words.items()):
        rows = {one["row"]: one for one in result["rows"] if one["status"] == "measured"}
        ours = rows.get(f"update/{shape}/{speed_rows.OURS}", {})
        layers = ours.get("scale", NOT).partition(" layers")[0]
        mfu = f"{ours['mfu']:.0%}" if ours.get("mfu") else NOT
        cells = [result["machine"]["card"].split()[1], layers, *times(result, f"update/{shape}/trl"), mfu]
        lines.append(" | ".join([first, *(cell.replace(NOT, found[1]) for cell in cells)]) + " |")
    return page.replace(found[2], "".join(f"{line}\n" for line in lines))


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
    for path in (runner.ROOT / name for name in READMES):
        path.write_text(readme_filled(path.read_text(encoding="utf-8")), encoding="utf-8")
