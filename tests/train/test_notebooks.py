"""Every notebook runs from top to bottom."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
    if path.name == "04_ppo.ipynb":
        check_curves(notebook)


def check_curves(notebook):
    """A trainer shows one output that ends on the last step, and neither transformers' table nor a line a step."""
    (cell,) = [cell for cell in notebook.cells if "trainer.train()" in cell.source]
    pages = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", ())]
    assert len(pages) == 1 and "srcdoc=" in pages[0] and "step 20/20  score " in pages[0]
    assert not [output for output in cell.outputs if output.get("name") == "stderr"]


def test_there_are_notebooks():
    assert NOTEBOOKS
