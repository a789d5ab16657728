"""The runner of the benchmarks for cards: resuming, limits, and what is said of rows that did not finish."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from benchmarks.gpu import (
    card,
    everything,
    exact,
    kernels,
    memory_rows,
    preflight,
    prof,
    quickstart,
    runner,
    speed_rows,
)

QUIET = Console(quiet=True)
PARTS = {"prof": prof, "kernels": kernels, "quickstart": quickstart}
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
        assert json.loads(options.output.read_text()) == result
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


def test_a_row_that_the_end_of_all_cut_short_is_tried_again(run, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now_s[0])

    def too_long(name):
        now_s[0] += 100
        return {"status": "unfinished", "reason": "It took more than 100 s."}

    result, _ = run(too_long, ROWS[:2], minutes=2.5)
    assert statuses(result) == {"a": "unfinished", "b": "left"}


def test_rows_of_another_card_do_not_mix(run, monkeypatch):
    run({}, ROWS[:1])
    monkeypatch.setattr(runner, "machine", lambda: {"card": "H100", "torch": "2", "transformers": "5", "trl": "1"})
    with pytest.raises(SystemExit, match=r"The rows of .*out\.json are of card none and not H100"):
        run({}, ROWS[:2])


def test_make_starts_all_with_wheels_in_a_folder_that_dill_takes_for_a_library():
    asked = ["make", "--dry-run", "--always-make", "gpu", "gpu-preflight", "WHEELS=wheels", "PYTHON=python3"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=runner.ROOT).stdout
    assert re.findall(r"python3 -m (benchmarks\.gpu\.\w+)", said) == [
        "benchmarks.gpu.everything",
        "benchmarks.gpu.preflight",
    ]
    assert "--no-index" in said and ".venv" not in said
    assert re.findall(r"--target \"(\S+)\"", said) == [f"{runner.ROOT}/out/gpu/site-packages"]


def test_a_part_that_fails_keeps_no_other_from_starting(monkeypatch, capsys):
    started = []

    def run(command, **options):
        started.append(command[2:])
        return subprocess.CompletedProcess(command, 1 if "benchmarks.gpu.exact" in command else 0)

    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(everything.sys, "argv", ["everything", "--minutes", "2", "--scale", "tiny"])
    assert everything.main() == 1
    parts = [words[0].rpartition(".")[2] for words in started]
    assert parts == [part for part, _ in everything.ORDER]
    assert all(words[-2:] == ["--scale", "tiny"] for words in started)
    started.clear()
    monkeypatch.setattr(everything, "WHEELS", ("trl", "no-such-wheel"))
    monkeypatch.setattr(everything.sys, "argv", ["everything", "--minutes", "0"])
    assert everything.main() == 0 and not started
    assert "missing: no-such-wheel. Rows that need it" in capsys.readouterr().out


def test_what_is_least_known_and_most_claimed_comes_first_over_all_parts():
    rows = {
        "speed": speed_rows.rows("tiny", None, None),
        "exact": exact.all_rows(),
        "memory": list(memory_rows.ROWS),
        **{name: [Row(one) for one in part.NAMES] for name, part in PARTS.items()},
    }
    order = [row.name for part, names in everything.ORDER for row in runner.chosen(rows[part], names)]
    assert set(order) == {row.name for each in rows.values() for row in each}
    # A row of each kind, as they are ordered.
    first = ["update/dualkv/trl_ext", "varlen", "reward/full/zero3/14B", "grpo/lora/zero3/7B"]
    first += ["ppo-separate/full/zero0/0.5B", "native/reward/full/14B", "qlora/grpo/zero0/7B", "step/vllm/trl_ext"]
    first += ["clock/lora-256/trl_ext", "update/tail/trl", "reward", "grpo/full/zero0/0.5B"]
    assert sorted(first, key=order.index) == first


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


def test_the_preflight_starts_without_the_libraries_that_it_looks_for():
    script = "import sys; sys.modules |= dict.fromkeys(('datasets', 'trl', 'peft', 'deepspeed'))\n"
    script += "from benchmarks.gpu import preflight; print(*preflight.missing())"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=runner.ROOT)
    assert {"datasets", "trl", "peft", "deepspeed"} <= set(said.stdout.split()), said.stderr


def test_what_a_machine_lacks_is_named(monkeypatch, capsys):
    monkeypatch.setattr(preflight.os, "environ", dict(os.environ))
    monkeypatch.setattr(preflight, "WHEELS", ("trl", "no-such-wheel"))
    monkeypatch.setattr(preflight.sys, "argv", ["preflight", "--no_rows"])
    assert preflight.main() == 1
    assert "missing: no-such-wheel (ModuleNotFoundError" in capsys.readouterr().out
    monkeypatch.setattr(preflight, "WHEELS", ("trl", "py-cpuinfo"))
    assert preflight.main() == 0 and "All packages can be imported." in capsys.readouterr().out


def test_rows_go_on_from_the_results_of_this_checkout_where_they_are_this_machines(run, tmp_path, monkeypatch):
    first, _ = run({}, ROWS[:2])
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    for changes, left in (({}, ["c"]), ({"machine": {**first["machine"], "card": "another"}}, ["a", "b", "c"])):
        (tmp_path / "home.json").write_text(json.dumps(first | changes))
        _, asked = run({}, ROWS[:3], output=tmp_path / "elsewhere" / "home.json")
        assert [name for name, _ in asked] == left
        (tmp_path / "elsewhere" / "home.json").unlink()


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


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L4", 121),
        ("A card of tomorrow", None),
    ],
)
def test_the_rate_of_a_card_is_the_tables_and_unknown_for_others(name, tflops):
    assert card.peak_tflops(name) == tflops
