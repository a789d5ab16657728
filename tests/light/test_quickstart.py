"""The quickstart's data holds out whole pairs of operands, and its folder is built once and whole."""

import json
import re
import threading

import pytest

from benchmarks.quickstart import sums
from benchmarks.quickstart.assets import build_once, cache_folder
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    pytest.importorskip("reasoning_gym")
    folder = tmp_path_factory.mktemp("data")
    sums.build_data(folder)
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }


def expression(row):
    """`4 + 3` of a row's question."""
    return row["prompt"][0]["content"].partition(": ")[2].partition(" =")[0]


def operands(row):
    left, _, right = expression(row).split()
    return frozenset({left, right})


@pytest.mark.slow  # reasoning_gym
def test_rows_are_2000_and_64_without_operands_in_common_each_asking_for_a_right_answer(splits):
    assert len(splits["train"]) == 2000
    assert len({expression(row) for row in splits["test"]}) == len(splits["test"]) == 64
    assert not {operands(row) for row in splits["train"]} & {operands(row) for row in splits["test"]}
    for row in [*splits["train"], *splits["test"]]:
        left, sign, right = expression(row).split()
        assert int(row["answer"]) == int(left) + (int(right) if sign == "+" else -int(right))
    (message,) = splits["test"][0]["prompt"]
    assert message["role"] == "user" and message["content"].endswith(" = ?\nAnswer with the equation only.")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRL_EXT_CACHE", raising=False)
    assert cache_folder() == tmp_path / "trl_ext" / "quickstart"
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "quickstart"


def test_a_folder_is_built_once_and_a_build_that_fails_leaves_nothing(tmp_path):
    builds = []

    def build(folder):
        builds.append(folder)
        (folder / "file").write_text("x")

    for _ in range(2):
        build_once(tmp_path / "model", build)
    assert len(builds) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        build_once(tmp_path / "other", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_of_two_builds_at_once_one_wins_and_both_return(tmp_path):
    both_building = threading.Barrier(2)

    def build(folder):
        (folder / "file").write_text("x")
        both_building.wait(timeout=120)

    threads = [threading.Thread(target=build_once, args=(tmp_path / "model", build)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["README.md", "README_zh.md"])
def test_the_readme_begins_with_the_commands_from_the_clone_on(name):
    first_screen = (ROOT / name).read_text().partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", first_screen, re.DOTALL)
    commands = [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in blocks]
    assert ["git clone ADDRESS-OF-THIS-REPOSITORY trl_ext && cd trl_ext", "make quickstart", "make test"] in commands


def test_ci_runs_the_second_command():
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
