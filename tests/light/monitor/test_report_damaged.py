"""`trl-ext report` of a folder whose files are broken or hostile: a sentence, and never a page without bounds."""

import json
from itertools import pairwise

import pytest
import yaml

from trl_ext.cli.report import report
from trl_ext.errors import DataError
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.record import write_record

VERSIONS = {"trainer": "grpo", "packages": {"trl_ext": "1"}}
LOG = [{"step": step, "reward": 0.5} for step in (1, 2)]
DEEP = "[" * 100_000
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")
)
LONG = f"a: &a {'x' * 10**6}\nb: [{','.join(['*a'] * 1_000)}]\n"

DAMAGED = {
    "log nested": ("log.jsonl", DEEP + "\n", "maximum recursion depth"),
    "log of numbers": ("log.jsonl", "5\n", "is damaged"),
    "step that is none": ("log.jsonl", '{"step": {"a": 1}, "reward": 1}\n', "values that no run writes"),
    "step of 4,000 digits": ("log.jsonl", f'{{"step": {"9" * 4_000}, "reward": 1}}\n', "values that no run writes"),
    "bytes": ("log.jsonl", b'{"step": 1, "x": "\xff"}\n', "can't decode byte"),
    "versions nested": ("versions.json", DEEP, "maximum recursion depth"),
    "packages": ("versions.json", json.dumps(VERSIONS | {"packages": 5}), "values that no run writes"),
    "cards": ("versions.json", json.dumps(VERSIONS | {"cards": 5}), "values that no run writes"),
    "rules": ("rules.yaml", "rules: [5]\n", "values that no run writes"),
    "long rules": ("rules.yaml", "x" * 5_000_000, "more than 4,194,304 characters"),
    "datasets": ("recipe.yaml", "datasets: 5\n", "values that no run writes"),
    "model": ("recipe.yaml", "model_name_or_path: {a: 1}\n", "values that no run writes"),
    "dates as keys": ("recipe.yaml", "a: {2020-01-01: 1}\n", "values that no run writes"),
    "number of 10^5 digits": ("recipe.yaml", f"a: 0x{'f' * 100_000}\n", "values that no run writes"),
    "bomb": ("recipe.yaml", BOMB, "more than 4,194,304 characters"),
    "bomb of text": ("recipe.yaml", LONG, "more than 4,194,304 characters"),
    "circle": ("recipe.yaml", "a: &a [*a]\n", "more than 4,194,304 characters"),
    "plan": ("plan.json", "[1]", "it holds no keys"),
}


@pytest.fixture
def run(tmp_path):
    """The folder of a run with a record and a log."""
    folder = tmp_path / "run"
    write_record(folder, {"model_name_or_path": "m"}, VERSIONS, {"rules": [{"rule": "length"}]})
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    return folder


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_sentence(name, content, said, run):
    put(run / name, content)
    with pytest.raises(DataError, match=said):
        report([str(run)])


@pytest.mark.parametrize("name", ["packages", "rules", "dates as keys"])
def test_a_damaged_file_is_a_sentence_of_a_comparison_too(name, run, tmp_path):
    write_record(tmp_path / "other", {}, VERSIONS)
    (tmp_path / "other" / "log.jsonl").write_bytes((run / "log.jsonl").read_bytes())
    file, content, said = DAMAGED[name]
    put(run / file, content)
    with pytest.raises(DataError, match=said):
        report(["--compare", str(run), str(tmp_path / "other")])


def test_a_nested_state_is_a_sentence(tmp_path):
    put(tmp_path / "trainer_state.json", DEEP)
    with pytest.raises(DataError, match=r"trainer_state.json is damaged: maximum recursion depth"):
        report([str(tmp_path)])


def test_a_log_of_very_many_names_is_a_sentence(run):
    with pytest.raises(DataError, match="20,001 names, more than a page can show"):
        write_report(run, [{"step": 1, **{f"rewards/a rule {i}/mean": 0.5 for i in range(20_000)}}])


def test_dates_and_names_that_are_numbers_are_settings_as_well(run):
    put(run / "recipe.yaml", yaml.safe_dump({5: "five"}) + "a: [2020-01-01]\n")
    write_report(run)
    assert "2020-01-01" in (run / "report.html").read_text()
