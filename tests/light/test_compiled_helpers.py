"""A lock that a killed build has left stops no later test run, and what one has built the next does not build."""

import os
import shutil

import pytest

from tests.compiled_helpers import own_folder, quick_compiler


@pytest.fixture
def build(tmp_path):
    """Puts a helper into a folder, as torch does."""

    def write(folder, name="cpu_adam", text="built", locked=False):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{name}.so").write_text(text)
        if locked:
            (folder / name / "lock").touch()

    return write


def test_a_helper_is_built_once_and_stays_as_old_as_it_is_for_ninja(tmp_path, build):
    with own_folder(tmp_path) as folder:
        build(folder)
        built_ns = (folder / "cpu_adam" / "cpu_adam.so").stat().st_mtime_ns
    with own_folder(tmp_path) as folder:
        assert (folder / "cpu_adam" / "cpu_adam.so").read_text() == "built"
        assert (folder / "cpu_adam" / "cpu_adam.so").stat().st_mtime_ns == built_ns


def test_a_lock_stays_where_it_was_left_and_a_build_that_was_killed_is_not_kept(tmp_path, build):
    build(tmp_path, locked=True)
    with own_folder(tmp_path) as folder:
        assert not list(folder.iterdir())
        build(folder, text="built again")
    with own_folder(tmp_path) as folder:
        assert (folder / "cpu_adam" / "cpu_adam.so").read_text() == "built again"
        assert not list(folder.rglob("lock"))
    with own_folder(tmp_path) as folder:
        build(folder, "whole")
        build(folder, "killed", locked=True)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"cpu_adam", "whole"}


def test_a_run_that_has_built_nothing_leaves_what_another_one_has_built_meanwhile(tmp_path, build):
    build(tmp_path)
    with own_folder(tmp_path):
        with own_folder(tmp_path) as other:
            build(other, text="built again")
    assert (tmp_path / "cpu_adam" / "cpu_adam.so").read_text() == "built again"


def test_two_runs_at_once_have_folders_of_their_own(tmp_path, build):
    with own_folder(tmp_path) as one, own_folder(tmp_path) as other:
        build(one, text="by one")
        assert not list(other.iterdir())
        build(other, text="by the other")
    assert (tmp_path / "cpu_adam" / "cpu_adam.so").read_text() == "by the other"  # built later
    assert not one.exists() and not other.exists()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_each_run_names_the_same_compiler_or_ninja_would_build_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "c++")
    quick_compiler(tmp_path)
    named, text = os.environ["CXX"], (tmp_path / "c++").read_text()
    quick_compiler(tmp_path)  # which it may not take for the compiler that it calls
    assert os.environ["CXX"] == named and (tmp_path / "c++").read_text() == text
