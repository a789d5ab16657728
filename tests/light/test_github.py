"""The forge's files: the workflow runs what CI runs, and the forms ask what a report needs."""

import re

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / ".github"


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_workflow_runs_the_tests_on_a_supported_python():
    job = read("workflows/tests.yml")["jobs"]["test"]
    steps = {step.get("uses", step.get("run")): step.get("with", {}) for step in job["steps"]}
    assert ".ci/run" in steps and "make test" in (ROOT / ".ci/run").read_text()
    version = steps["actions/setup-python@v5"]["python-version"]
    assert f"Programming Language :: Python :: {version}" in (ROOT / "pyproject.toml").read_text()


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
