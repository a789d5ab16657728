"""Runs compared in one table: what they came to, and in what they differ."""

import json

import pytest

from tests.run_folder import write_run
from trl_ext.cli.main import main
from trl_ext.errors import DataError
from trl_ext.monitor.compare import compare_runs, short_names


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "a" / "run", num_steps=20, beta=0.0)
    second = write_run(folder / "b" / "run", num_steps=10, learning_rate=2e-5, beta=0.0)
    versions = json.loads((second / "versions.json").read_text())
    versions["packages"]["trl"] = "1.15.0"
    (second / "versions.json").write_text(json.dumps(versions))
    (second / "rules.yaml").write_text("rules:\n- {rule: answer, gold: solution}\n")
    return first, second


def test_numbers_stand_side_by_side_and_only_settings_that_differ_below(runs):
    header, *rows = compare_runs(runs)
    assert header == ["", "a/run", "b/run"]
    found = {name: cells for name, *cells in rows}
    assert found["reward, held-out"] == ["0.90", "0.90"] and found["steps"] == ["20", "10"]
    assert found["reward, last steps"] == ["0.90", "0.95"]
    assert found["seconds per step, last steps"] == ["4.00", "4.00"]
    assert found["memory at the peak, GiB"] == ["40.0", "40.0"]
    assert rows[-3:] == [
        ["learning_rate", "1e-05", "2e-05"],
        ["rule answer", "rule answer, gold answer", "rule answer, gold solution"],
        ["trl", "1.16.0", "1.15.0"],
    ]


def test_a_run_without_a_record_has_dashes_for_settings_and_names_are_as_short_as_can_be(tmp_path, runs):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    (tmp_path / "trainer_state.json").write_text((runs[0] / "trainer_state.json").read_text())
    found = {name: cells for name, *cells in compare_runs([runs[0], tmp_path])}
    assert found["learning_rate"] == ["1e-05", "-"] and found["steps"] == ["20", "20"]


def test_half_a_run_is_one_sentence(runs, tmp_path, subtests):
    for number, (name, content, sentence) in enumerate(
        [
            ("trainer_state.json", '{"log_history": [1]}', "is damaged: its log_history is no list of entries"),
            ("trainer_state.json", "[]", "is damaged"),
            ("recipe.yaml", "a: [", "is damaged"),
            ("versions.json", None, r"has no versions\.json: its run ended while it was beginning"),
        ]
    ):
        folder = write_run(tmp_path / str(number))
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
        with subtests.test(name), pytest.raises(DataError, match=sentence) as caught:
            compare_runs([runs[0], folder])
        assert "\n" not in str(caught.value)


def test_the_command_prints_the_table_and_a_hostile_setting_is_text(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    other = write_run(tmp_path / "[red]other", learning_rate="\x1b[31mred")
    assert main(["report", "--compare", str(runs[0]), str(other)]) == 0
    out = capsys.readouterr().out
    assert "[red]other" in out and "\x1b" not in out and "\\u001b[31mred" in out
