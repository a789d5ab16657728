"""Every notebook runs from top to bottom; most in a fork of a Python that has the libraries imported."""

import asyncio
import os

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

from tests.conftest import ROOT
from tests.multi.warm import warm_python

# Its kernel is a fresh one: transformers asks at its import whether it is in a notebook.
WATCHED = "04_ppo.ipynb"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    kernel = AsyncKernelManager(kernel_name="python3")
    if path.name != WATCHED:
        kernel.kernel_spec.argv = [str(warm_python()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    try:
        NotebookClient(notebook, km=kernel, timeout=900, resources=where).execute()
    finally:
        asyncio.run(kernel.shutdown_kernel(now=True))  # a client ends only kernels that it has made
    assert not asyncio.run(kernel.is_alive())
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
    if path.name == WATCHED:
        check_curves(notebook)


def check_curves(notebook):
    """A trainer shows one output that ends on the last step, and neither transformers' table nor a line a step."""
    (cell,) = [cell for cell in notebook.cells if "trainer.train()" in cell.source]
    pages = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", ())]
    assert len(pages) == 1 and "srcdoc=" in pages[0] and "step 20/20  score " in pages[0]
    assert not [output for output in cell.outputs if output.get("name") == "stderr"]


def test_there_are_notebooks():
    assert NOTEBOOKS
