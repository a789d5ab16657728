"""The report in a real browser: all sections are there, and nothing of a completion runs."""

import os
import re
import shutil
import signal
import subprocess

import markupsafe
import pytest

from tests.run_folder import HOSTILE, write_run
from trl_ext.monitor.pages.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync
--disable-component-update --disable-extensions --virtual-time-budget=2000"""
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    write_report(folder)
    return folder


def dom(path, profile):
    """The page's elements after everything in it that could run has run."""
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom", path.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=120)[0]
    finally:
        if process.poll() is None:  # its own processes, too
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def title(text):
    return re.search(r"<title>(.*?)</title>", text)[1]


@pytest.mark.slow
def test_every_section_is_in_the_browser_and_a_completion_stays_text(folder, tmp_path):
    text = dom(folder / "report.html", tmp_path)
    sections = re.findall(r'<section id="([\w-]+)"', text)
    assert sections == ["verdict", "curves", "samples", "time", "memory", "held-out", "steps", "settings"]
    assert title(text) == "GRPO on org/&lt;model&gt;"
    assert "<pre dir=\"auto\">&lt;script&gt;document.title='owned'&lt;/script&gt;&lt;img src=x" in text
    assert text.count("<svg") == 1


def hostile_page(folder, tmp_path, is_guarded):
    """The report as it would be had a template forgotten to escape a completion."""
    page = (folder / "report.html").read_text()
    forgotten = page.replace(str(markupsafe.escape(HOSTILE[0])), HOSTILE[0])
    assert HOSTILE[0] in forgotten and POLICY.search(forgotten)
    path = tmp_path / "hostile.html"
    path.write_text(forgotten if is_guarded else POLICY.sub("", forgotten))
    return path


@pytest.mark.slow
def test_a_completion_that_were_not_escaped_would_run_but_for_the_policy(folder, tmp_path):
    """What the test above rests on: without escape and policy, the completion changes the title."""
    assert title(dom(hostile_page(folder, tmp_path, is_guarded=False), tmp_path / "a")) == "owned"
    assert title(dom(hostile_page(folder, tmp_path, is_guarded=True), tmp_path / "b")) == "GRPO on org/&lt;model&gt;"
