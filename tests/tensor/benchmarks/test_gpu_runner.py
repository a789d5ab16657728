"""The runner of the benchmarks for cards: resuming, limits, and what is said of rows that did not finish."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from benchmarks.gpu import (
    everything,
    preflight,
    runner,
    together,
)
from benchmarks.machine import commit

QUIET = Console(quiet=True)
MEASURED = {"status": "measured", "figure": 1}


class Row:
    def __init__(self, name):
        self.name = name


ROWS = [Row(name) for name in "abcdefgh"]


@pytest.fixture
def run(tmp_path):
    """Runs a call of a benchmark, with answers by row; returns its result and the rows that were asked."""

    def call(answers, rows=ROWS, **changes):
        asked = []

        def run_row(row, limit_s):
            asked.append((row.name, limit_s))
            found = answers(row.name) if callable(answers) else answers.get(row.name, MEASURED)
            return dict(found)

        words = ["--device", "cpu", "--scale", "tiny", "--output", str(tmp_path / "out.json")]
        options = runner.parser("gpu_toy", "A toy.").parse_args(words)
        for name, value in changes.items():
            setattr(options, name, value)
        made = runner.Run("gpu_toy", rows, options, run_row, 100.0, lambda records: {"own": len(records)})
        result = made.measure(QUIET)
        assert json.loads(options.output.read_text()) == {"commit": commit(), **result}
        return result, asked

    return call


def statuses(result):
    return {one["row"]: one["status"] for one in result["rows"]}


def test_a_row_that_ended_is_not_run_again_and_one_that_broke_is(run):
    ends = {"a": "measured", "b": "oom", "c": "unfinished", "d": "skipped", "e": "failed"}
    answers = {name: {"status": status, "reason": "made up"} for name, status in ends.items()}
    first, _ = run(answers, ROWS[:5])
    assert statuses(first) == ends
    second, asked = run({}, ROWS[:6])
    assert [name for name, _ in asked] == ["d", "e", "f"]
    assert statuses(second) == {**ends, "d": "measured", "e": "measured", "f": "measured"}
    assert second["summary"] | {"rows": 6, "measured": 4, "oom": 1, "unfinished": 1, "own": 6} == second["summary"]


def test_no_row_begins_that_would_end_too_late(run, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now_s[0])

    def of_70_seconds(name):
        now_s[0] += 70
        return MEASURED

    result, asked = run(of_70_seconds, minutes=5)
    assert asked == [("a", 100), ("b", 100), ("c", 100), ("d", 90)]
    left = {"status": "left", "reason": "The 5 minutes were over."}
    assert result["rows"][4:] == [{"row": row.name, **left} for row in ROWS[4:]]


def test_rows_of_another_card_do_not_mix(run, monkeypatch):
    run({}, ROWS[:1])
    monkeypatch.setattr(runner, "machine", lambda: {"card": "H100", "torch": "2", "transformers": "5", "trl": "1"})
    with pytest.raises(SystemExit, match=r"The rows of .*out\.json are of card none and not H100"):
        run({}, ROWS[:2])


def test_a_part_that_fails_keeps_no_other_from_starting(monkeypatch, capsys):
    started = []

    def run(command, **options):
        started.append(command[2:])
        return subprocess.CompletedProcess(command, 1 if "benchmarks.gpu.together" in command else 0)

    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(preflight, "missing", dict)
    monkeypatch.setattr(everything.sys, "argv", ["everything", "--minutes", "2", "--scale", "tiny"])
    assert everything.main() == 1
    parts = [words[0].rpartition(".")[2] for words in started]
    assert parts == [part for part, _ in everything.ORDER]
    assert all(words[-2:] == ["--scale", "tiny"] for words in started)


def test_nothing_runs_where_a_package_cannot_be_imported(monkeypatch, tmp_path, capsys):
    # It is found, but what it imports is not there.
    (tmp_path / "broken_wheel.py").write_text("import typing_inspection_of_another_day")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preflight, "WHEELS", ("trl", "broken-wheel"))
    started = []

    def run(command, **options):
        started.extend(command[2:3] if "-m" in command else [])  # libraries start programs, too
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(everything.sys, "argv", ["everything", "--minutes", "2"])
    assert everything.main() == 2 and not started
    assert "missing: broken-wheel (ModuleNotFoundError" in capsys.readouterr().out
    monkeypatch.setattr(everything.sys, "argv", ["everything", "--minutes", "2", "--anyway"])
    assert everything.main() == 0 and len(started) == len(everything.ORDER)


def test_three_rows_that_fail_alike_end_their_part(run):
    def fails(name):
        return {"status": "failed", "reason": f"[{ord(name)}, 32] does not match."}

    result, asked = run(fails)
    assert [name for name, _ in asked] == ["a", "b", "c"]
    assert statuses(result) == dict.fromkeys("abc", "failed") | dict.fromkeys("defgh", "left")
    assert result["rows"][3]["reason"].startswith("3 rows failed for one reason: ")
    result, asked = run(lambda name: {"status": "failed", "reason": f"no {name}"})
    assert len(asked) == 8


def test_rows_run_side_by_side_as_room_and_cores_allow_and_keep_no_seconds(run, tmp_path):
    now, most, together_with, lock = {}, [0, 0.0], {}, threading.Lock()
    needs = dict(a=60.0, b=30.0, c=30.0, d=30.0, e=1.0, f=100.0)

    def run_row(row, limit_s):
        with lock:
            now[row.name] = needs[row.name]
            most[:] = max(most[0], len(now)), max(most[1], sum(now.values()))
            for name in now:
                together_with.setdefault(name, set()).update(now)
        time.sleep(0.3)
        with lock:
            del now[row.name]
        timed = {"seconds": 1.0, "measured": {"allocated": 5, "seconds": {"update": 1.0}}}
        return MEASURED | timed | {"error_pct": {"allocated": 1.0, "update_s": 2.0}}

    options = runner.parser("gpu_toy", "").parse_args(["--device", "cpu", "--output", str(tmp_path / "out.json")])
    made = runner.Run("gpu_toy", ROWS[:6], options, run_row, 100.0, lambda records: {})
    tasks = [together.Task(made, row, needs[row.name]) for row in made.waiting()]
    together.side_by_side(tasks, 91.0, 3, QUIET)
    assert most[0] == 3 and most[1] == 100.0  # that of the one that is larger than the room
    assert together_with["f"] == {"f"} and len(together_with["a"]) > 1
    for name, one in made.records.items():
        was_alone = name == "f"
        assert ("seconds" in one, "update_s" in one["error_pct"]) == (was_alone, was_alone)
        assert bool(one["measured"]["seconds"]) == was_alone and one["measured"]["allocated"] == 5


def ends_at_once():
    os._exit(3)


def raises():
    raise ValueError("made up")


def test_preflight_names_rows_that_break_and_goes_on(capsys):
    rows = {
        "dies": ends_at_once,
        "raises": raises,
        "speed: a": lambda: MEASURED,
        "memory: b": lambda: {"status": "skipped", "reason": "It is not installed."},
    }
    assert preflight.run(rows, Console(width=200)) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("dies: failed") and "ValueError: made up" in said[1]
    assert said[2:] == ["speed: a: measured", "memory: b: skipped It is not installed."]


@pytest.mark.nightly
def test_the_preflight_starts_without_the_libraries_that_it_looks_for():
    script = "import sys; sys.modules |= dict.fromkeys(('datasets', 'trl', 'peft', 'deepspeed'))\n"
    script += "from benchmarks.gpu import preflight; print(*preflight.missing())"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=runner.ROOT)
    assert {"datasets", "trl", "peft", "deepspeed"} <= set(said.stdout.split()), said.stderr


def test_the_answer_of_a_process_is_its_last_line_behind_the_prefix():
    script = f"print('noise'); print('{runner.PREFIX}' + '{{\"status\": \"measured\"}}'); print('noise')"
    assert runner.ask(["-c", script], 60) == {"status": "measured"}


def test_a_process_without_an_answer_failed_with_its_last_words():
    found = runner.ask(["-c", "raise ValueError('made up')"], 60)
    assert found["status"] == "failed" and "made up" in found["reason"]


def test_a_process_that_takes_too_long_is_ended_with_what_it_started():
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    begun_s = time.monotonic()
    assert runner.ask(["-c", script], 0.5) == {"status": "unfinished", "reason": "It took more than 0 s."}
    assert time.monotonic() - begun_s < 30
