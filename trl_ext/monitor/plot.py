"""`reward.png`: the curves of a run over its steps, for GRPO the reward and every rule."""

import io
from collections.abc import Sequence
from typing import Any

from trl_ext.errors import SupportError
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Curve, Entry, RunKind
from trl_ext.monitor.summary import held_out_entries, training_entries

Lines = dict[Curve, tuple[list[int], list[float]]]


def reward_png(log_history: Sequence[Entry]) -> bytes:
    """The plot as PNG: lines for training, dots of the same colour for the held-out rows, a panel for each axis.

    Raises:
        SupportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise SupportError("reward.png needs matplotlib. Run: pip install trl-ext[report]") from error

    kind = log_keys.kind_of(log_history)
    # A figure with its own canvas leaves the user's matplotlib backend alone.
    figure = Figure(figsize=(8, max(4, 2.4 * len(kind.axes))), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(kind.axes), sharex=True, squeeze=False)[:, 0]
    training, held_out = _lines(log_history, ""), _lines(log_history, HELD_OUT)
    curves = kind.in_order([*training, *held_out])
    for panel, axis in zip(panels, kind.axes, strict=True):
        _draw(panel, kind, [curve for curve in curves if curve.axis == axis], training, held_out)
        panel.set_ylabel(axis)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw(panel: Any, kind: RunKind, curves: Sequence[Curve], training: Lines, held_out: Lines) -> None:
    """The curves of one axis and their legend; members of a family are thinner than what they add up to."""
    for curve in curves:
        width = 2.5 if curve in kind.curves else 1.3
        (line,) = panel.plot(*training.get(curve, ([], [])), label=curve.name, linewidth=width)
        if curve in held_out:
            panel.plot(*held_out[curve], "o", color=line.get_color(), markersize=6)
    if any(curve in held_out for curve in curves):
        panel.plot([], [], "o", color="grey", label="held-out")
    if curves:
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _lines(log_history: Sequence[Entry], prefix: str) -> Lines:
    """Steps and values per curve."""
    lines: Lines = {}
    for entry in held_out_entries(log_history) if prefix else training_entries(log_history):
        for curve, value in log_keys.values(entry, prefix).items():
            steps, values = lines.setdefault(curve, ([], []))
            steps.append(int(entry.get("step", 0)))
            values.append(value)
    return lines
