"""Curves of a run below its cell in a notebook, drawn again during the run."""

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import Entry
from trl_ext.monitor.pages.page import panel_chart, render
from trl_ext.monitor.pages.series import main_panels, read_series

MOST_OF_TIME = 0.05  # share of a run's time for drawing
_HEAD_PX, _CHART_PX = 60, 370


class NotebookCurves:
    """One output of a cell, replaced at each drawing: a line of text, and below it a chart for each axis.

    The charts are in a separate frame, so that neither their style nor a rule's name affects the notebook.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._begin_s = time.perf_counter()
        self._drawing_s = 0.0

    def show(self, line: str, log_history: Sequence[Entry], *, is_last: bool = False) -> None:
        """Draw the run so far, unless drawing takes too much of its time; the last drawing is always made."""
        now_s = time.perf_counter()
        if not is_last and self._drawing_s > MOST_OF_TIME * (now_s - self._begin_s):
            return
        from IPython.display import display

        data = {"text/plain": line, "text/html": curves_html(line, log_history)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._drawing_s += time.perf_counter() - now_s


def curves_html(line: str, log_history: Sequence[Entry]) -> str:
    """Return an HTML frame with the run's main curves below a line of text."""
    series = read_series(log_history)
    drawn = (panel_chart(panel, series, is_main=True) for panel in main_panels(log_keys.kind_of(log_history)))
    pictures = [picture for picture in drawn if picture is not None]
    page = render("curves.html.jinja", title="trl_ext", line=line, pictures=pictures)
    height = _HEAD_PX + _CHART_PX * len(pictures)
    # The empty sandbox forbids the frame everything, also text that a browser takes for a script.
    return f'<iframe sandbox="" width="100%" height="{height}" style="border:0" srcdoc="{escape(page)}"></iframe>'
