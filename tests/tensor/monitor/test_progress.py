"""A run of more than a minute prints after its first step how long it will take, evaluations included."""

import io
import sys
from types import SimpleNamespace

import pytest

from trl_ext.monitor import progress


@pytest.mark.parametrize(
    ("step_s", "eval_on_start", "said"),
    [
        (10, True, "about 3:40 for the whole run, judged by its first step\n"),
        (10, False, "about 3:30 for the whole run, judged by its first step\n"),
        (1, True, ""),
    ],
)
def test_a_run_is_estimated_by_its_first_step(step_s, eval_on_start, said, monkeypatch, capsys):
    seconds = iter([0.0, 10.0, 10.0 + step_s, 10.0 + step_s])  # 10 s before the first step
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    args = SimpleNamespace(disable_tqdm=True, eval_on_start=eval_on_start, eval_strategy="steps")
    state = SimpleNamespace(is_world_process_zero=True, max_steps=20, global_step=0, eval_steps=20)
    line = progress.ProgressLine()
    line.on_train_begin(args, state, None)
    line.on_step_begin(args, state, None)
    state.global_step = 1
    line.on_step_end(args, state, None)
    assert capsys.readouterr().err == said


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("disable_tqdm", "is_first"), [(False, True), (True, True), (False, False)])
def test_a_terminal_has_a_bar_and_lines_above_it(disable_tqdm, is_first, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    args = SimpleNamespace(disable_tqdm=disable_tqdm, eval_on_start=False)
    state = SimpleNamespace(is_world_process_zero=is_first, max_steps=4, global_step=0)
    line = progress.ProgressLine()
    line.on_log(args, state, None, {"eval_reward": 0.25})  # an evaluation without a training
    line.on_train_begin(args, state, None)
    line.on_step_begin(args, state, None)
    state.global_step = 1
    line.on_step_end(args, state, None)
    line.on_log(args, state, None, {"reward": 0.5, "loss": 0.1})
    line.on_log(args, state, None, {"eval_reward": 0.75})
    line.on_train_end(args, state, None)
    said = terminal.getvalue()
    assert ("held-out after step 0" in said and "held-out after step 1" in said) is is_first
    assert ("1/4" in said and "\r" in said) is (is_first and not disable_tqdm)
    assert ("step 1/4  reward" in said) is (is_first and disable_tqdm)
