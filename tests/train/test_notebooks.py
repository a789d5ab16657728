"""Every notebook runs from top to bottom; most in a fork of a Python that has the libraries imported. The one with a
pretrained model does so every night, with the quickstart's; by day its cells run with a random one.

A kernel sees only packages that the README's line of installation and the notebook's first cell bring: before that
cell runs, every other one of this environment is hidden from its imports.
"""

import asyncio
import importlib.util
import os
import re
import shutil
import tomllib
from datetime import date
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import tiny, trained
from tests.conftest import ROOT
from tests.multi.warm import warm_python
from tests.nightly import daily
from tests.other_python import python_with

# Its kernel is a fresh one: transformers asks at its import whether it is in a notebook.
WATCHED = "04_ppo.ipynb"
# Its model, and what is replaced where a random one, which learns nothing, takes its place for a step.
PRETRAINED, MODEL = "09_your_data.ipynb", "HuggingFaceTB/SmolLM2-135M-Instruct"
REPLACED = {"TOKENS, STEPS, LEARNING_RATE = 16, 20": "TOKENS, STEPS, LEARNING_RATE = 2, 1"}
REPLACED |= {"assert shares[1] > shares[0] and sum(history[-5:]) > 1.5 * sum(history[:5])": "shares"}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What of `pip install jupyter` this environment has.
JUPYTER = ("ipykernel", "nbclient")
HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
    del sys.modules[name]
"""


def first_cell(path):
    return next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")


def named(text):
    """The extras of ours and the packages of the line of pip in a text."""
    folder, *packages = re.search(r"pip install (.+)", text)[1].split("  ")[0].replace('"', "").split()
    return [*re.findall(r"[\w-]+", folder)], packages


def brought(extras, packages):
    """The names of the distributions that these extras and packages bring along."""
    wanted = [
        *PROJECT["dependencies"],
        *(need for extra in extras for need in PROJECT["optional-dependencies"][extra]),
    ]
    left = [Requirement(text) for text in [*wanted, *packages, *(JUPYTER if "jupyter" in packages else ())]]
    found = {}
    while left:
        need = left.pop()
        name = canonicalize_name(need.name)
        if need.extras <= found.get(name, set()) and name in found:
            continue
        found[name] = found.get(name, set()) | need.extras
        try:
            needs = map(Requirement, requires(name) or ())
        except PackageNotFoundError:
            continue
        extras = ["", *found[name]]
        left += [one for one in needs if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]
    return found


def hidden(path):
    """The top-level modules of this environment that whoever follows README and first cell does not have."""
    readme, own = named((ROOT / "README.md").read_text()), named(first_cell(path))
    there = brought(readme[0] + own[0], readme[1] + own[1])
    modules = packages_distributions().items()
    kept = {"trl-ext", *there}
    return {module for module, names in modules if not kept & set(map(canonicalize_name, names))} - {"trl_ext"}


def lacking(path):
    """The packages of the notebook's own line of pip that this environment does not have."""
    there = {canonicalize_name(name) for names in packages_distributions().values() for name in names}
    return [name for name in named(first_cell(path))[1] if canonicalize_name(name) not in {*there, "jupyter"}]


TOYS = [path for path in NOTEBOOKS if path.name != PRETRAINED]
TODAY = TOYS[date.today().toordinal() % 4 :: 4]  # a quarter, another one each day


@pytest.mark.parametrize("path", daily(NOTEBOOKS, *TODAY), ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    if path.name == PRETRAINED:
        put_model(trained.folder(), tmp_path)
    execute(notebook, path, tmp_path, monkeypatch)
    if path.name == WATCHED:
        check_lines(notebook)


def test_the_notebook_with_a_pretrained_model_runs_with_a_random_one(tmp_path, monkeypatch):
    path = ROOT / "notebooks" / PRETRAINED
    notebook = nbformat.read(path, as_version=4)
    for text, other in REPLACED.items():
        (cell,) = [cell for cell in notebook.cells if text in cell.source]
        cell.source = cell.source.replace(text, other)
    folder = tmp_path / "model"
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    for made in (tiny.model("llama"), tokenizer):
        made.save_pretrained(folder)
    put_model(folder, tmp_path)
    execute(notebook, path, tmp_path, monkeypatch)


def put_model(folder, where):
    """Let the notebook's model be the one in the folder."""
    (where / MODEL).parent.mkdir()
    (where / MODEL).symlink_to(folder)


def execute(notebook, path, tmp_path, monkeypatch):
    """Run the cells in a folder that has the notebooks' modules and no card."""
    for module in path.parent.glob("*.py"):
        shutil.copy(module, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    absent = lacking(path)
    python = python_with(absent, "TRL_EXT_OTHER_PYTHON", tmp_path / "venv") if absent else ""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    where = {"metadata": {"path": str(tmp_path)}}
    kernel = AsyncKernelManager(kernel_name="python3")
    if path.name != WATCHED and not absent:
        kernel.kernel_spec.argv = [str(warm_python()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    if absent:
        kernel.kernel_spec.argv[0] = python
    (tmp_path / "hide.py").write_text(f"HIDDEN = {set() if absent else hidden(path)}\n{HIDE}")
    kernel.kernel_spec.argv += [f"--IPKernelApp.exec_files={tmp_path / 'hide.py'}"]
    try:
        NotebookClient(notebook, km=kernel, timeout=900, resources=where).execute()
    finally:
        asyncio.run(kernel.shutdown_kernel(now=True))  # a client ends only kernels that it has made
    assert not asyncio.run(kernel.is_alive())
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")


def check_lines(notebook):
    """A trainer prints a line for each logging step, and not transformers' table."""
    (cell,) = [cell for cell in notebook.cells if "trainer.train()" in cell.source]
    assert not [output for output in cell.outputs if "text/html" in output.get("data", ())]
    printed = "".join(output.text for output in cell.outputs if output.get("name") == "stderr")
    assert re.findall(r"^step (\d+)/20  score ", printed, re.MULTILINE) == ["4", "8", "12", "16", "20"]


def test_a_notebook_sees_what_it_names_and_no_more():
    unseen = hidden(ROOT / "notebooks/03_rules.ipynb")
    assert {"pytest", "hypothesis", "ruff", "math_verify"} <= unseen
    assert not unseen & {"torch", "deepspeed", "trl", "matplotlib", "ipykernel", "numpy"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_first_cell_stops_in_a_sentence_where_something_is_missing(path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"There is no trl_ext, .*matplotlib: run the second line without its #"):
        exec(first_cell(path), {})
