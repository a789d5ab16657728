"""A run of more than a minute prints after its first step how long it will take, evaluations included."""

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
