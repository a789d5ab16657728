"""The runner of the benchmarks for cards: resuming, limits, and what is said of rows that did not finish."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from benchmarks.gpu import (
    card,
    everything,
    exact,
    kernels,
    memory,
    memory_rows,
    preflight,
    prof,
    quickstart,
    runner,
    speed_rows,
    together,
)
from benchmarks.machine import commit

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


def test_an_exact_name_is_that_row_alone():
    rows = [Row(name) for name in ("update/trl", "update/trl_ext", "step/trl")]
    assert runner.chosen(rows, ["update/trl"]) == rows[:1]
    assert runner.chosen(rows, ["update/t", "step/trl"]) == rows
    assert runner.chosen(rows, []) == rows
    assert [name for name in preflight.rows() if name.startswith("speed: update")] == [
        "speed: update/dualkv/trl",
        "speed: update/dualkv/trl_ext",
    ]


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


def test_exactness_and_memory_go_into_the_files_of_their_parts(tmp_path, monkeypatch):
    for part in (exact, memory):
        monkeypatch.setattr(part, "run_row", lambda *row: {"status": "failed", "reason": "made up"})
    words = ["--device", "cpu", "--scale", "tiny", "--rows", "reward", "grpo/full/zero0"]
    monkeypatch.setattr(together.sys, "argv", ["together", *words, "--output", str(tmp_path / "x.json")])
    assert together.main() == 0
    found = [[one["row"] for one in json.loads(path.read_text())["rows"]] for path in sorted(tmp_path.iterdir())]
    assert found == [["reward"], ["grpo/full/zero0/0.5B"]]


def test_out_of_memory_beside_others_is_tried_again_alone(run, tmp_path):
    options = runner.parser("gpu_toy", "").parse_args(["--device", "cpu", "--output", str(tmp_path / "out.json")])
    oom = {"status": "oom", "reason": "made up"}
    made = runner.Run("gpu_toy", ROWS[:1], options, lambda row, limit_s: oom, 100.0, lambda records: {})
    made.one(ROWS[0], QUIET, lambda: True)
    assert made.records["a"]["status"] == "left" and made.waiting()
    made.one(ROWS[0], QUIET)
    assert made.records["a"]["status"] == "oom" and not made.waiting()


def test_a_row_that_packs_where_its_job_does_not_failed():
    found = {"status": "measured", "packed": False}
    assert runner.checked(found, packing=False) is found
    assert runner.checked(found, packing=True)["status"] == "failed"
    assert runner.checked({"status": "oom"}, packing=True) == {"status": "oom"}


def test_what_is_least_known_and_most_claimed_comes_first_over_all_parts():
    rows = {
        "speed": speed_rows.rows("tiny", None, None),
        "exact": exact.all_rows(),
        "memory": list(memory_rows.ROWS),
        **{name: [Row(one) for one in part.NAMES] for name, part in PARTS.items()},
    }
    rows["together"] = rows["exact"] + rows["memory"]
    order = [row.name for part, names in everything.ORDER for row in runner.chosen(rows[part], names)]
    assert order[:2] == ["grpo/lora/zero3/7B", "update/dualkv/trl_ext"]
    assert set(order) == {row.name for each in rows.values() for row in each}
    # A row of each kind, as they are ordered.
    first = ["grpo/lora/zero3/7B", "update/dualkv/trl_ext", "varlen", "reward/full/zero3/14B"]
    first += ["ppo-separate/full/zero0/0.5B", "native/reward/full/14B", "qlora/grpo/zero0/7B", "update/tail/trl"]
    first += ["step/vllm/trl_ext", "clock/lora-256/trl_ext", "grpo/full/zero0/0.5B", "step/dualkv/trl"]
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


SCRIPT = """
from rich.console import Console
from benchmarks.gpu import memory_worker, preflight
from trl_ext.trainers.ppo import trainer
from tests.twin import adapters
preflight.SPEED = preflight.EXACT = ["none"]
preflight.MEMORY = ["ppo-adapter/lora/zero2/14B"]
preflight.run(preflight.rows(), Console(width=200))
adapters.gathers_of_any_shape = adapters.nullcontext
preflight.run(preflight.rows(), Console(width=200))
"""


@pytest.mark.nightly
def test_preflight_gathers_as_on_a_card_and_breaks_without_the_adapter_for_it():
    pytest.importorskip("deepspeed")
    variables = os.environ | preflight.SURROUNDINGS
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=runner.ROOT, env=variables
    )
    ended = re.findall(r"^memory: ppo-adapter/lora/zero2/14B: (.*)", done.stdout, re.MULTILINE)
    assert ended[:1] == ["measured"] and "doesn't match the broadcast shape" in ended[1], done.stdout + done.stderr


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
