"""The tables of what cards have measured: the page's are made from the committed results, and results fill them."""

import json
import re

import pytest

from benchmarks.gpu import evidence, memory_report, runner, speed, speed_rows
from benchmarks.gpu.memory_rows import ROWS
from trl_ext.memory.units import GIB

PAGE = evidence.PAGE.read_text(encoding="utf-8")


def result(rows, card="NVIDIA H100 80GB HBM3", **changes):
    about = {"basis": runner.MEASURED, "scale": "full", "machine": {"card": card}, "summary": {}}
    return {**about, "rows": rows, **changes}


@pytest.fixture
def write(tmp_path):
    def writes(name, found):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
        return evidence.filled(PAGE, tmp_path)

    return writes


def lines(page, row):
    return re.findall(rf"^\| `{row}`.*$", page, re.MULTILINE)


def memory_row(gib):
    answer = {"status": "measured", "allocated": {"update": gib * GIB}, "reserved": {"update": (gib + 1) * GIB}}
    return memory_report.record(ROWS[0], {**answer, "step_phases": {"update": 2.5, "score": 0.5}})


def test_the_tables_of_the_page_are_those_that_the_script_writes():
    assert evidence.filled(PAGE) == PAGE
    for part, rows in evidence.ROWS.items():
        assert f"<!-- card: {part} -->" in PAGE
        assert all(lines(PAGE, row.name) for row in rows)


def test_what_a_card_measured_stands_beside_what_was_planned(write):
    page = write("gpu_memory", result([memory_row(50), {"row": ROWS[1].name, "status": "left", "reason": "over"}]))
    (line,) = lines(page, ROWS[0].name)
    assert "NVIDIA H100 80GB HBM3" in line and "/ 50.00 |" in line and "/ 51.00 |" in line and "/ 2.50 |" in line
    assert evidence.NOT_YET in lines(page, ROWS[1].name)[0]
    assert evidence.filled(page) == PAGE


def test_each_card_has_a_line_and_a_row_that_ran_out_of_memory_says_so(write):
    write("gpu_memory", result([memory_row(50)]))
    page = write("gpu_memory_h200", result([{**memory_row(50), "status": "oom"}], card="NVIDIA H200"))
    first, second = lines(page, ROWS[0].name)
    assert "H100" in first and "| NVIDIA H200: oom |" in second


def test_speed_has_both_mfus_and_how_much_faster_ours_is(write):
    row = next(row for row in speed_rows.rows("full", None, None) if row.name == "update/dualkv/trl")
    found = {"allocated": 5 * GIB, "reserved": 6 * GIB, "phases": {"update": 2.0}, "mfu": 0.41, "mfu_verl": 0.83}
    one = {"row": row.name, "status": "measured", "scale": "9 of 36 layers", **found, **speed.held(row, found)}
    summary = {"faster_than": {row.name: {"step": 2.5}}}
    (line,) = lines(write("gpu_speed", result([one], summary=summary)), row.name)
    assert line.startswith(f"| `{row.name}`, 9 of 36 layers | ") and "| 41% | 83% | 2.50 times |" in line


def test_exactness_is_counted(write):
    one = {"row": "varlen", "status": "measured", "passed": 7, "failed_tests": {}, "skipped_tests": {"a": "no card"}}
    assert lines(write("gpu_exact", result([one])), "varlen") == ["| `varlen` | NVIDIA H100 80GB HBM3 | 7 | 0 | 1 |"]


@pytest.mark.parametrize("changes", [{"basis": "a processor: it runs, no more"}, {"scale": "tiny"}])
def test_what_no_card_has_measured_fills_nothing(changes, write):
    assert write("gpu_memory", result([memory_row(50)], **changes)) == PAGE
