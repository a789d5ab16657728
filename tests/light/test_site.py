"""The documentation site, built as `make docs` builds it."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path):
    """A page that is not in the navigation, and a link that leads nowhere, are errors."""
    pytest.importorskip("mkdocs")
    # Word for word: with --quiet, for example, mkdocs counts no warning.
    (line,) = re.findall(r"^docs:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    build = line.replace("$(BIN)/python", shlex.quote(sys.executable))
    build += f" --site-dir {shlex.quote(str(tmp_path / 'site'))}"
    done = subprocess.run(build, cwd=ROOT, env=os.environ, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert not re.findall(r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+stylesheet[^>]+https?:""", text)
