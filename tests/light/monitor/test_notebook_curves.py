"""Curves below a notebook's cell: one output that is replaced, in a frame that nothing leaves."""

from html import unescape

import pytest

from trl_ext.monitor import notebook
from trl_ext.monitor.notebook import NotebookCurves, curves_html

HISTORY = [{"step": step, "reward": step / 10, "rewards/<b>/mean": 0.5} for step in range(1, 6)]


@pytest.fixture
def outputs(monkeypatch):
    """What a notebook was told to show: each output with its replacements."""
    shown = []

    class Handle:
        def update(self, data, raw):
            shown[-1].append(data)

    def display(data, raw, display_id):
        shown.append([data])
        return Handle()

    ipython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(ipython, "display", display)
    return shown


def test_the_frame_holds_a_chart_and_lets_nothing_out():
    frame = curves_html("step 5/9  <script>", HISTORY)
    assert frame.startswith('<iframe sandbox="" ') and frame.count("<") == 2
    page = unescape(frame)
    assert page.count("<svg") == 1 and "&lt;script&gt;" in page and "&lt;b&gt;" in page and "<b>/" not in page


def test_one_output_is_replaced_and_ends_on_the_last_line(outputs, monkeypatch):
    monkeypatch.setattr(notebook, "MOST_OF_TIME", 0.0)  # a first drawing is made whatever the share
    curves = NotebookCurves()
    for step in range(1, 6):
        curves.show(f"step {step}", HISTORY[:step], is_last=step == 5)
    assert [one["text/plain"] for one in outputs[0]] == ["step 1", "step 5"] and len(outputs) == 1


def test_a_drawing_that_costs_little_is_made_at_each_entry(outputs, monkeypatch):
    monkeypatch.setattr(notebook, "MOST_OF_TIME", 1e9)
    curves = NotebookCurves()
    for step in range(1, 4):
        curves.show(f"step {step}", HISTORY[:step])
    assert len(outputs[0]) == 3
