"""Runs compared on one page: their curves over each other, what they came to, and in what they differ."""

import json
import re

import pytest

from tests.run_folder import write_run
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError, DataError
from trl_ext.monitor.compare import short_names, write_comparison


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


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    return write_comparison(runs, tmp_path_factory.mktemp("page") / "comparison.html").read_text()


def rows(html, section):
    """Cells of every row in a section."""
    part = html[html.index(f'<section id="{section}">') :].partition("</section>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in part.split("<tr>")[1:] if "<td" in row]


def test_only_settings_and_versions_that_differ_are_shown(html):
    assert rows(html, "settings") == [
        ["learning_rate", "1e-05", "2e-05"],
        ["rule answer", "rule answer, gold answer", "rule answer, gold solution"],
        ["trl", "1.16.0", "1.15.0"],
    ]
    assert "settings are the same" in html


def test_final_numbers_stand_side_by_side(html):
    found = {name: cells for name, *cells in rows(html, "numbers")}
    assert found["reward, held-out"] == ["0.90", "0.90"] and found["steps"] == ["20", "10"]
    assert found["reward, last steps"] == ["0.90", "0.95"]
    assert found["seconds per step, last steps"] == ["4.00", "4.00"]
    assert found["memory at the peak, GiB"] == ["40.0", "40.0"]


def test_each_curve_is_one_chart_with_a_line_for_every_run(html):
    titles = re.findall(r'aria-label="(.*) over optimizer steps"', html)
    assert titles[:3] == ["Reward", "Rule_0", "Rule_1"] and "Entropy" in titles and "Time of a step" in titles
    assert len(set(titles)) == len(titles)
    chart = html[html.index('aria-label="Entropy') :].partition("</svg>")[0]
    assert re.findall(r'<g class="(h\d)', chart) == ["h0", "h1"]


def test_names_are_as_short_as_they_can_be_told_apart(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


def test_a_run_without_a_record_is_compared_and_said_to_have_none(runs, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "trainer_state.json").write_text((runs[0] / "trainer_state.json").read_text())
    html = write_comparison([runs[0], bare], tmp_path / "page.html").read_text()
    assert "No settings were recorded in bare." in html and "Entropy" in html


def test_a_hostile_name_of_a_folder_is_text(runs, tmp_path):
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>")
    html = write_comparison([runs[0], folder], tmp_path / "page.html").read_text()
    assert "<img" not in html and "&lt;img src=x" in html


def test_a_page_of_ours_is_replaced_and_no_other_file(runs, tmp_path):
    path = write_comparison(runs, tmp_path / "page.html")
    write_comparison(runs, path)
    path.write_text("my notes")
    for target in (path, tmp_path):
        with pytest.raises(ConfigError, match="is no page that trl_ext has written"):
            write_comparison(runs, target)
    assert path.read_text() == "my notes"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("trainer_state.json", '{"log_history": [1]}', "is damaged: its log_history is no list of entries"),
        ("trainer_state.json", "[]", "is damaged"),
        ("recipe.yaml", "a: [", "is damaged"),
        ("versions.json", None, r"has no versions\.json: its run ended while it was beginning"),
    ],
)
def test_half_a_run_is_one_sentence(runs, tmp_path, name, content, sentence):
    folder = write_run(tmp_path / "half")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(DataError, match=sentence) as caught:
        write_comparison([runs[0], folder], tmp_path / "page.html")
    assert "\n" not in str(caught.value) and not (tmp_path / "page.html").exists()


def test_the_command_writes_the_page_where_it_is_called(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--compare", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "Comparison: comparison.html\n"
    assert "<h1>2 runs compared</h1>" in (tmp_path / "comparison.html").read_text()
