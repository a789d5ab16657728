"""The forge's files: the workflows run what CI and the lanes run, and the forms ask what a report needs."""

import re
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT
from tests.lanes import run_all
from trl_ext import __version__

FOLDER = ROOT / ".github"


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [f"3.{minor}" for minor in range(20) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]
# Lanes that a runner of the forge cannot run, and why.
NOT_THERE = {"gpu-emulated": "installs PyTorch for CUDA, 5 GB", "trl-suite": "needs a checkout of TRL"}


def steps_of(job: dict) -> dict:
    """The inputs of each step, by its action or its command."""
    return {step.get("uses", step.get("run")): step.get("with", {}) for step in job["steps"]}


def test_the_light_checks_run_on_each_supported_python_and_all_tests_after_them_on_one():
    jobs = read("workflows/tests.yml")["jobs"]
    assert jobs["light"]["strategy"]["matrix"]["python"] == PYTHONS and "make light" in steps_of(jobs["light"])
    assert jobs["test"]["needs"] == "light" and ".ci/run" in steps_of(jobs["test"])
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert steps_of(jobs["test"])["actions/setup-python@v5"]["python-version"] in PYTHONS
    assert {f"Programming Language :: Python :: {python}" for python in PYTHONS} <= set(PROJECT["classifiers"])


def test_each_night_runs_all_lanes_but_those_that_a_runner_cannot():
    workflow = read("workflows/nightly.yml")
    assert workflow[True]["schedule"]  # PyYAML reads the key `on` as true
    (job,) = workflow["jobs"].values()
    assert set(job["strategy"]["matrix"]["lane"]) == set(run_all.LANES) - set(NOT_THERE)
    assert "make ${{ matrix.lane }}" in steps_of(job)


@pytest.mark.parametrize("name", ["tests", "nightly"])
def test_runners_without_a_card_take_pytorch_without_cuda_and_nobody_else(name):
    workflow = read(f"workflows/{name}.yml")
    assert workflow["env"] == {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
    # The forge ends a job after six hours.
    assert all(job["timeout-minutes"] < 360 for job in workflow["jobs"].values())
    assert not any("pytorch.org/whl" in (ROOT / file).read_text() for file in ("Makefile", "pyproject.toml"))


def test_a_citation_names_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    assert f"## {__version__} - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_report_of_a_hole_is_the_first_thing_that_the_page_on_security_names():
    sections = (ROOT / "SECURITY.md").read_text().split("\n## ")
    assert sections[1].startswith("Reporting") and "Report a vulnerability" in sections[1]


def test_a_form_has_the_fields_that_the_forge_requires():
    for path in sorted((FOLDER / "ISSUE_TEMPLATE").glob("*.yml")):
        form = read(f"ISSUE_TEMPLATE/{path.name}")
        assert {"name", "description", "body"} <= form.keys(), path.name
        for field in form["body"]:
            assert field["type"] == "textarea" and field["attributes"]["label"] and field["id"], path.name


def test_a_bug_comes_with_the_recipe_and_the_output_of_doctor():
    fields = {field["id"]: field for field in read("ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "trl-ext doctor" in fields["doctor"]["attributes"]["label"]
    assert all(fields[name]["validations"]["required"] for name in ("recipe", "doctor"))


def test_the_pull_request_has_four_lines():
    lines = (FOLDER / "pull_request_template.md").read_text().splitlines()
    assert len(lines) == 4 and all(re.match(r"\*\*.+\*\*.*:$", line) for line in lines)
