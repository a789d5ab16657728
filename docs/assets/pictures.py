"""Draw the README's pictures from the planner of rows and the presets: `python docs/assets/pictures.py`.

Text stays text in the SVG files, so that `tests/light/test_figures.py` can hold them against today's numbers.
"""

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.planner.presets import PRESETS
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize

FOLDER = Path(__file__).parent
PROMPT_TOKENS, GROUP = 40, 8
BLUE, ORANGE, GREY = "#4878a8", "#ee8a3a", "#d9d9d9"
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "trl_ext", "font.size": 10, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "font.family": ["Helvetica", "Arial", "sans-serif"]})


def completion_lengths() -> list[int]:
    """Tokens of eight completions of one prompt, log-normal as in real groups."""
    draw = random.Random(0)
    return [max(2, min(160, round(draw.lognormvariate(3.6, 0.8)))) for _ in range(GROUP)]


def token_counts() -> tuple[int, int]:
    """Tokens of the padded batch and of the flat row."""
    lengths = completion_lengths()
    # The last prompt token is repeated in front of each completion: it predicts the completion's first token.
    (row,) = plan_rows([RowSize(group=0, shared=PROMPT_TOKENS - 1, own=1 + n) for n in lengths])
    return GROUP * (PROMPT_TOKENS + max(lengths)), row.num_tokens


def draw_padding() -> None:
    """One group as a padded batch, and the same tokens as a flat row, to one scale."""
    lengths = completion_lengths()
    padded, flat = token_counts()
    width = PROMPT_TOKENS + max(lengths)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
    for i, n in enumerate(lengths):
        left.barh(i, PROMPT_TOKENS, color=BLUE)
        left.barh(i, n, left=PROMPT_TOKENS, color=ORANGE)
        left.barh(i, max(lengths) - n, left=PROMPT_TOKENS + n, color=GREY)
    left.set_title(f"TRL: padded, {padded:,} tokens")
    start = 0
    for length, color in [(PROMPT_TOKENS - 1, BLUE), *((1 + n, ORANGE) for n in lengths)]:
        end = start + length - 0.8  # a gap between segments
        while start < end:  # wrapped at the width of the padded batch
            line, column = divmod(start, width)
            part = min(end - start, width - column)
            right.barh(int(line), part, left=column, color=color)
            start += part
        start = end + 0.8
    right.set_title(f"trl_ext: one flat row, {flat:,} tokens")
    for axis in (left, right):
        axis.set(xlim=(0, width), ylim=(GROUP - 0.4, -0.6), yticks=[], xlabel="tokens")
    names = {"prompt": BLUE, "completions": ORANGE, "padding": GREY}
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    save(figure, "padding.svg")


# What one would have tried first, over the preset's settings.
_FULL_PPO = dict(method="full", critic="separate", reward_model="copy", zero_stage=2, per_device_train_batch_size=1)
_FP32_DDP = dict(zero_stage=0, dtype="float32", use_vllm=False, gradient_as_bucket_view=False)
OBVIOUS = {
    **dict.fromkeys(("ppo-7b-4xa100-80gb", "ppo-13b-4xa100-80gb", "ppo-8b-4xa40-48gb"), _FULL_PPO),
    "reward-8b-6x4090-8192": dict(activation_offloading=False),
    "reward-8b-6x4090-4096": dict(zero_stage=0, dtype="float32"),
    "grpo-7b-2xa100-40gb": dict(method="full", zero_stage=3, use_vllm=False),
    **dict.fromkeys(("grpo-8b-8xa100-80gb", "grpo-7b-8xa100-40gb"), _FP32_DDP),
}


def memory_rows() -> list[tuple[str, float, float, float]]:
    """Name, GiB of the preset, GiB of the obvious settings and usable GiB of the card, for the users' cases."""
    rows = []
    for name, one in PRESETS.items():
        found = one.plan()
        settings = {"checkpoint_every": 1, "keep_attention": False, **OBVIOUS[name]}
        obvious = estimate(replace(found.job, **settings), found.estimate.shape, found.estimate.hardware)
        assert found.estimate.fits and not obvious.fits, name
        rows.append((name, found.estimate.peak_gib, obvious.peak_gib, obvious.hardware.card.usable_gib))
    return rows


def draw_memory() -> None:
    """GiB of the presets beside the obvious settings and the card."""
    rows = memory_rows()
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for row, (_, preset, obvious, card) in enumerate(rows):
        axis.barh(row - 0.2, obvious, height=0.36, color=GREY)
        axis.barh(row + 0.2, preset, height=0.36, color=BLUE)
        axis.text(obvious + 1, row - 0.2, f"{obvious:.1f}", va="center", fontsize=8)
        axis.text(preset - 1, row + 0.2, f"{preset:.1f}", va="center", ha="right", fontsize=8, color="white")
        axis.plot([card, card], [row - 0.45, row + 0.45], color="black")
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.invert_yaxis()
    axis.set_xlabel("GiB on each GPU, estimated")
    handles = [Patch(color=GREY, label="obvious settings"), Patch(color=BLUE, label="preset")]
    handles.append(plt.Line2D([], [], color="black", label="what the card has"))
    axis.legend(handles=handles, frameon=False)
    save(figure, "memory.svg")


def family_curves() -> dict[str, tuple[list[int], list[list[float]]]]:
    """Episodes, and held-out accuracy after them for each seed, by method: of `benchmarks/family.py`."""
    runs = json.loads((FOLDER.parents[1] / "benchmarks/results/family_cpu.json").read_text())["results"]
    methods = dict.fromkeys(run["method"] for run in runs)
    return {
        m: (runs[0]["episodes"], [run["held_out_accuracy"] for run in runs if run["method"] == m]) for m in methods
    }


def draw_family() -> None:
    """Mean of the seeds as a line, lowest to highest as a band."""
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for (method, (episodes, seeds)), color in zip(
        family_curves().items(), (BLUE, ORANGE, "#59a14f", "#b07aa1"), strict=True
    ):
        by_update = list(zip(*seeds, strict=True))
        axis.plot(episodes, list(map(statistics.mean, by_update)), color=color, label=method)
        axis.fill_between(
            episodes, list(map(min, by_update)), list(map(max, by_update)), color=color, alpha=0.15, lw=0
        )
    axis.set(xlabel="episodes", ylabel="held-out accuracy, sampled answers")
    axis.legend(frameon=False)
    save(figure, "family.svg")


def learning_curves() -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of training, and the share of held-out answers right after them: of `benchmarks/learning.py`."""
    found = json.loads((FOLDER.parents[1] / "benchmarks/results/learning_cpu.json").read_text())
    return {name: tuple(zip(*found[name]["curve"], strict=True))[1:] for name in ("trl_ext", "trl")}


def draw_learning() -> None:
    """Held-out answers over seconds of training, a point for each look at them."""
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for (name, (seconds, right)), color in zip(learning_curves().items(), (BLUE, ORANGE), strict=True):
        axis.plot(seconds, [100 * share for share in right], color=color, marker="o", markersize=4)
        axis.annotate(
            f"{'TRL' if name == 'trl' else name}: {seconds[-1]:,.0f} s",
            (seconds[-1], 100 * right[-1]),
            xytext=(8, -4) if name == "trl_ext" else (0, 8),
            textcoords="offset points",
            ha="left" if name == "trl_ext" else "right",
            color=color,
        )
    axis.set(xlabel="seconds of training, generation included", ylabel="held-out answers right, %", xlim=(0, None))
    save(figure, "learning.svg")


PHASES = {"generation": ("generate",), "update": ("update",), "other": ("score", "logps", "other")}


def step_seconds() -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of one step by case, trainer and phase: of `benchmarks/whole_step.py`."""
    found = json.loads((FOLDER.parents[1] / "benchmarks/results/whole_step_cpu.json").read_text())
    return {
        case: {
            run["variant"]: {
                phase: sum(run["phases"][name] for name in names) / run["steps"] for phase, names in PHASES.items()
            }
            for run in found[case]["results"]
        }
        for case in ("answers", "tail")
    }


def draw_step() -> None:
    """Seconds of a whole step as bars of its phases, a scale for each case."""
    titles = {"answers": "answers of at most 16 tokens", "tail": "a long tail: median 24, longest 256"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.2), layout="constrained")
    colors = dict(zip(PHASES, (ORANGE, BLUE, GREY), strict=True))
    for axis, (case, runs) in zip(axes, step_seconds().items(), strict=True):
        for row, phases in enumerate(runs.values()):
            left = 0.0
            for phase, seconds in phases.items():
                axis.barh(row, seconds, left=left, color=colors[phase])
                left += seconds
            axis.text(left, row, f" {left:,.1f} s", va="center")
        axis.set_yticks(range(len(runs)), ["TRL" if name == "trl" else name for name in runs])
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set(title=titles[case], xlabel="seconds of a whole step")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    save(figure, "step.svg")


def story_runs() -> list[dict]:
    """The runs of `benchmarks/story.py`, in their order."""
    return json.loads((FOLDER.parents[1] / "benchmarks/results/story_cpu.json").read_text())["runs"]


def draw_story() -> None:
    """Held-out answers right after each run of the story, a bar each, with what it changed."""
    figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
    runs = story_runs()
    for row, run in enumerate(runs):
        right = 100 * run["held_out_after"]
        axis.barh(row, right, color=BLUE if row else GREY)
        axis.text(right, row, f" {right:.0f} %", va="center")
    axis.set_yticks(range(len(runs)), [run["name"] for run in runs])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set(xlabel="held-out answers right after 20 steps, %")
    save(figure, "story.svg")


def save(figure: plt.Figure, name: str) -> None:
    """Write without a date, so that the same numbers make the same file."""
    figure.savefig(FOLDER / name, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw_padding()
    draw_memory()
    draw_family()
    draw_learning()
    draw_step()
    draw_story()
