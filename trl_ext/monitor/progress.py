"""Progress of a run on rank 0: a bar on a terminal, otherwise one short line per logging step.

It replaces transformers' ProgressCallback and PrinterCallback, which print the whole metrics dictionary at every step.
"""

import shutil
import sys
import time
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback

from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import HELD_OUT, Entry
from trl_ext.monitor.words import duration, score, scores

_BAR = "step {n_fmt}/{total_fmt} |{bar:20}| {desc}"


class ProgressLine(ProgressCallback, PrinterCallback):
    """Shows steps, the run's curves (for GRPO the reward and every rule) and time left; lines with `disable_tqdm`.

    Our trainers have it instead of transformers' callbacks. It subclasses both, so that code which removes either, as
    in `trainer.remove_callback(PrinterCallback)`, removes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar = tqdm(disable=True)  # shows nothing
        self._steps_s = 0.0  # seconds inside optimizer steps: evaluation and saving do not count
        self._num_steps = 0
        self._train_begin_s = self._step_begin_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._train_begin_s = time.perf_counter()
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            bar_format=_BAR,
            # tqdm's measure hides the bar in a container whose terminal reports a width of 0.
            ncols=shutil.get_terminal_size().columns,
            disable=not state.is_world_process_zero or args.disable_tqdm or not sys.stderr.isatty(),
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_begin_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps_s += time.perf_counter() - self._step_begin_s
        self._num_steps += 1
        if self._num_steps == 1 and state.is_world_process_zero:
            # Estimated from the first step, and from the first evaluation if the run began with it.
            total_s = time.perf_counter() - self._train_begin_s + (state.max_steps - state.global_step) * self._steps_s
            if args.eval_on_start and args.eval_strategy == "steps":
                num_evaluations = state.max_steps // state.eval_steps - state.global_step // state.eval_steps
                total_s += num_evaluations * (self._step_begin_s - self._train_begin_s)
            if total_s >= 60:
                self._print(f"about {duration(total_s)} for the whole run, judged by its first step")
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Overrides transformers.ProgressCallback.on_log: show the latest numbers after the bar, or print them."""
        if not state.is_world_process_zero or not logs:
            return
        if log_keys.kind_of_entry(logs, HELD_OUT):
            self._print(f"held-out after step {state.global_step}  {_plot(logs, HELD_OUT)}")
        elif log_keys.kind_of_entry(logs):
            text = _plot(logs)
            left_s = self._steps_s / max(self._num_steps, 1) * (state.max_steps - state.global_step)
            if self._bar.disable:
                self._print(f"step {state.global_step}/{state.max_steps}  {text}  left {duration(left_s)}")
            else:
                self._bar.set_description_str(f"left {duration(left_s)}  {text}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()
        self._bar = tqdm(disable=True)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Overrides transformers.ProgressCallback.on_prediction_step: show no separate bar for an evaluation."""

    def _print(self, line: str) -> None:
        self._bar.write(line, file=sys.stderr)


def _plot(logs: Entry, prefix: str = "") -> str:
    """Return the curves with an axis as text; a single reward function, equal to the reward, is left out."""
    found = {curve: value for curve, value in log_keys.values(logs, prefix).items() if curve.axis}
    total = next(iter(found.values()), None)
    parts = [curve for curve in found if curve.key.startswith("rewards/")]
    if len(parts) == 1 and score(found[parts[0]]) == score(total):
        del found[parts[0]]
    return scores((curve.name, value) for curve, value in found.items())
