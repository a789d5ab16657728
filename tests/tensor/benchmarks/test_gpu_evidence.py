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
    return re.findall(rf"^\| `{re.escape(row)}`.*$", page, re.MULTILINE)


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
    assert evidence.filled(page) == PAGE, "the committed results fill it again"


def test_each_card_has_a_line_and_a_row_that_ran_out_of_memory_says_so(write):
    write("gpu_memory", result([memory_row(50)]))
    page = write("gpu_memory_h200", result([{**memory_row(50), "status": "oom"}], card="NVIDIA H200"))
    first, second = lines(page, ROWS[0].name)
    assert "H100" in first and "| NVIDIA H200: oom |" in second


def test_speed_has_both_mfus_and_how_much_faster_ours_is(write):
    row = next(row for row in speed_rows.rows("full", None, None) if row.name == "update/dualkv/trl")
    found = {"allocated": 5 * GIB, "reserved": 6 * GIB, "phases": {"update": 2.0}, "mfu": 0.41, "mfu_verl": 0.83}
    one = {"row": row.name, "status": "measured", "scale": "9 of 36 layers", **found, **speed.held(row, found)}
    one |= {"packed": False, "tokens_per_s": 11320, "tokens_per_s_verl": 50312, "note": "made up"}
    summary = {"faster_than": {row.name: {"step": 2.5, "update": 2.75}}}
    (line,) = lines(write("gpu_speed", result([one], summary=summary)), row.name)
    assert (
        line.startswith(f"| `{row.name}`, 9 of 36 layers | ") and "| 41% | 83% | 2.75 | 2.50 | not measured |" in line
    )
    assert "| 11,320 | 50,312 |" in line and line.endswith("| padded; made up |")
    summary["faster_than"]["step/dualkv/trl"] = {"step": 2.2, "update": 2.7}
    (line,) = lines(write("gpu_speed", result([one], summary=summary)), row.name)
    assert "| 2.75 | 2.50 | 2.20 |" in line
    one["row"] = "update/dualkv-keep/trl_ext"
    summary["faster_by"] = {one["row"]: {"step": 1.1, "update": 1.12}}
    (line,) = lines(write("gpu_speed", result([one], summary=summary)), one["row"])
    assert line.endswith("| padded; made up; 1.12 times the speed of the default's update |")


@pytest.mark.parametrize("name", evidence.READMES)
def test_a_readme_fills_itself_and_says_what_was_not_measured(name, tmp_path):
    page = (runner.ROOT / name).read_text(encoding="utf-8")
    assert evidence.readme_filled(page) == page
    lacking = {"README.md": "not measured"}.get(name, "未测")
    ours = {"row": "update/tail/trl_ext", "status": "measured", "scale": "9 of 36 layers, made up", "mfu": 0.5}
    faster = {"update/tail/trl": {"step": 2.5, "update": 2.75}, "step/tail/trl": {"step": 2.2, "update": 2.7}}
    for card, summary in (("NVIDIA H100 80GB HBM3", {}), ("NVIDIA H200", {"faster_than": faster})):
        found = result([ours], card=card, summary=summary)
        (tmp_path / f"gpu_speed_{card.split()[1]}.json").write_text(json.dumps(found))
    filled = evidence.readme_filled(page, tmp_path)
    tail = [line.split("<!-- tail --> | ")[1] for line in filled.splitlines() if "<!-- tail -->" in line]
    assert tail == [
        f"H100 | 9 of 36 | {lacking} | {lacking} | {lacking} | 50% |",
        "H200 | 9 of 36 | 2.75 | 2.50 | 2.20 | 50% |",
    ]
    assert filled.count(f"| H200 | {' | '.join([lacking] * 5)} |") == 1, "the other shape has no row"
    assert evidence.readme_filled(filled) == page


def test_exactness_is_counted(write):
    one = {"row": "varlen", "status": "measured", "passed": 7, "failed_tests": {}, "skipped_tests": {"a": "no card"}}
    (line,) = lines(write("gpu_exact", result([one])), "varlen")
    assert line == "| `varlen` | NVIDIA H100 80GB HBM3 | 7 | 0 | 1 |  |"


def test_parts_that_say_what_they_measured_are_quoted(write):
    one = {"row": "prof/update/tail", "status": "measured", "scale": "36 of 36 layers", "says": "gemm 40%; idle 2%"}
    (line,) = lines(write("gpu_prof", result([one])), "prof/update/tail")
    assert line == "| `prof/update/tail`, 36 of 36 layers | NVIDIA H100 80GB HBM3 | gemm 40%; idle 2% |"


@pytest.mark.parametrize("changes", [{"basis": "a processor: it runs, no more"}, {"scale": "tiny"}])
def test_what_no_card_has_measured_fills_nothing(changes, write):
    page = write("gpu_memory", result([memory_row(50)], **changes))
    assert all(evidence.NOT_YET in line for row in ROWS for line in lines(page, row.name))


COMMITTED = [one for part in evidence.ROWS for one in evidence.results_of(part, runner.RESULTS)]


def test_committed_results_say_of_which_card_versions_and_commit_they_are():
    assert COMMITTED
    for one in COMMITTED:
        assert re.fullmatch(r"[0-9a-f]{7,40}", one["commit"]) and one["machine"].keys() >= {*runner.BIRTH, "driver"}
        assert all(row["status"] in runner.FINAL for row in one["rows"]), "what failed is no figure"


def test_the_page_marks_what_may_not_be_read_as_a_figure():
    """Seconds of rows that shared the card, and reward rows that a false alarm padded."""
    for library in ("trl", "trl_ext"):
        (line,) = lines(PAGE, f"update/dualkv/{library}")
        assert line.split(" | ")[2] and "is left out" not in line
    for row in ("reward/lora/zero0/8B", "ppo-adapter/lora/zero0/8B"):
        (line,) = lines(PAGE, row)
        assert "no seconds" in line and not any(line.split(" | ")[4:7])
        assert ("padded" in line) == row.startswith("reward")
