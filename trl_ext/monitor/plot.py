"""`reward.png`: the reward and every rule over the steps of a run."""

import io
from collections.abc import Sequence

from trl_ext.errors import SupportError
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Entry
from trl_ext.monitor.summary import held_out_entries, training_entries


def reward_png(log_history: Sequence[Entry]) -> bytes:
    """The plot as PNG: lines for training, dots of the same colour for the held-out problems.

    Raises:
        SupportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise SupportError("reward.png needs matplotlib. Run: pip install trl-ext[report]") from error

    # A figure with its own canvas leaves the user's matplotlib backend alone.
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    training, held_out = _lines(log_history, ""), _lines(log_history, HELD_OUT)
    for name in dict.fromkeys([*training, *held_out]):
        width = 2.5 if name == "reward" else 1.3
        (line,) = axes.plot(*training.get(name, ([], [])), label=name, linewidth=width)
        if name in held_out:
            axes.plot(*held_out[name], "o", color=line.get_color(), markersize=6)
    if held_out:
        axes.plot([], [], "o", color="grey", label="held-out")
    axes.set(xlabel="step", ylabel="mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if training or held_out:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _lines(log_history: Sequence[Entry], prefix: str) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and means per line: the total reward first, then one line per rule."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for entry in held_out_entries(log_history) if prefix else training_entries(log_history):
        total = log_keys.reward(entry, prefix)
        means = ({} if total is None else {"reward": total}) | log_keys.rules(entry, prefix)
        for name, mean in means.items():
            steps, values = lines.setdefault(name, ([], []))
            steps.append(int(entry.get("step", 0)))
            values.append(mean)
    return lines
