"""Which signals end a run, and when; checkpoints/test_killed_runs.py resumes what they leave."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import psutil
import pytest
from transformers import TrainerCallback, TrainerState

from tests import grpo_trainers
from tests.preferences import pairs
from tests.reward_trainers import trainer
from trl_ext import RuleSet
from trl_ext.rewards import Length, Verdict
from trl_ext.rewards.rules import async_rule
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.trainers.ending import signals

NUM_STEPS = 4
AT = 2


class Signals(TrainerCallback):
    """Sends this process signals at the beginning of a step, and notes what would handle them in the first one."""

    def __init__(self, *numbers: int, at: int = AT):
        self.numbers, self.at, self.first_handlers = numbers, at, {}

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.first_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if state.global_step + 1 == self.at:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.fixture(autouse=True)
def usual_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    for number, handler in usual.items():
        signal.signal(number, handler)
    yield
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder, *callbacks, **changes):
    folder.mkdir(exist_ok=True)
    settings = {"save_strategy": "steps", "save_steps": 100, "max_steps": NUM_STEPS} | changes
    return trainer(folder, train=pairs(24), callbacks=list(callbacks), **settings)


def saved(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_before_the_first_step_has_ended_signals_end_at_once_and_one_in_the_last_changes_nothing(tmp_path):
    note = Signals(signal.SIGTERM, at=NUM_STEPS)
    trained = run(tmp_path, note)
    trained.train()
    assert note.first_handlers == {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    assert trained.state.global_step == NUM_STEPS


def test_a_second_sigterm_keeps_the_exit_code_also_when_all_is_saved(tmp_path, monkeypatch):
    ended, codes = run(tmp_path, Signals(signal.SIGTERM, signal.SIGTERM)), []
    with pytest.raises(SystemExit) as end:
        ended.train()
    monkeypatch.setattr(os, "_exit", codes.append)
    signal.raise_signal(signal.SIGTERM)  # while the report is written, and Python goes down
    assert end.value.code == 75 and codes == [75] and saved(tmp_path) == [f"checkpoint-{AT}"]


def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "SAME_PRESS_S", 0.0)
    ended = run(tmp_path, Signals(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ended.train()
    assert ended.state.global_step == AT - 1 and saved(tmp_path) == []


def test_one_ctrl_c_that_arrives_twice_is_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(signals, "SAME_PRESS_S", 3.0)
    ended = run(tmp_path, Signals(signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit):
        ended.train()
    assert ended.state.global_step == AT and saved(tmp_path) == [f"checkpoint-{AT}"]
    assert f"checkpoint-{AT} after SIGINT" in capfd.readouterr().err


# The launcher of a busy machine passes Ctrl-C on late.
@pytest.mark.parametrize("later_s", [0.2, 1.2])
def test_a_ctrl_c_that_arrives_again_a_moment_later_does_not_end_what_comes_after_training(tmp_path, later_s):
    class Again(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            signal.raise_signal(signal.SIGINT)
            threading.Timer(later_s, os.kill, (os.getpid(), signal.SIGINT)).start()

    trained = run(tmp_path, Again())
    trained.train()
    trained.save_model()
    time.sleep(later_s)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_checkpoint_stays_where_only_the_best_one_may(tmp_path):
    options = dict(save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, save_steps=1)
    evaluated = pairs(8, seed=1)
    ended = run(tmp_path, Signals(signal.SIGTERM), eval_dataset=evaluated, metric_for_best_model="loss", **options)
    with pytest.raises(SystemExit):
        ended.train()
    assert f"checkpoint-{AT}" in saved(tmp_path)


@pytest.mark.parametrize("at", [5, 6])
def test_a_run_that_resumes_has_the_evaluation_and_the_log_of_an_epoch_that_ended_with_the_signal(at, tmp_path):
    class Seen(TrainerCallback):
        folders: ClassVar[list[str]] = []

        def on_prediction_step(self, args, state, control, **kwargs):
            self.folders += saved(tmp_path / "ended")

    of_epochs = {f"{name}_strategy": "epoch" for name in ("eval", "save", "logging")}
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    options = dict(eval_dataset=pairs(8, seed=1), max_steps=12) | of_epochs | best
    whole, ended = run(tmp_path / "whole", **options), run(tmp_path / "ended", Signals(15, at=at), Seen(), **options)
    whole.train()
    with pytest.raises(SystemExit):
        ended.train()
    assert {*Seen.folders} == ({"checkpoint-6"} if at == 6 else set())  # which a kill in the evaluation leaves
    again = run(tmp_path / "ended", **options)
    again.train(resume_from_checkpoint=True)
    states = [trainer.state for trainer in (whole, again)]
    expected, found = ([(log["step"], log.get("eval_loss")) for log in state.log_history] for state in states)
    assert found == expected
    assert states[0].best_global_step == states[1].best_global_step == 6


@pytest.mark.parametrize(("strategy", "at"), [("steps", 2), ("epoch", 12)])
def test_where_only_the_best_checkpoints_are_saved_a_signal_saves_another(strategy, at, tmp_path):
    class Falls(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_falling"] = -state.global_step

    best = dict(save_strategy="best", metric_for_best_model="falling", greater_is_better=True)
    options = dict(eval_dataset=pairs(4, seed=1), eval_strategy=strategy, eval_steps=1, max_steps=18, **best)
    ended = run(tmp_path, Falls(), Signals(signal.SIGTERM, at=at), **options)
    with pytest.raises(SystemExit) as end:
        ended.train()
    assert end.value.code == 75 and saved(tmp_path) == sorted([f"checkpoint-{at // 2}", f"checkpoint-{at}"])
    kept = TrainerState.load_from_json(tmp_path / f"checkpoint-{at}" / "trainer_state.json")
    assert kept.best_global_step == at // 2
    assert [log["step"] for log in kept.log_history if "eval_loss" in log] == [at // 2, at]


@pytest.mark.parametrize("options", [{"save_strategy": "no"}, {"save_on_signal": False}], ids=["saves never", "off"])
def test_who_wants_no_checkpoint_gets_none(tmp_path, options):
    class Handlers(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    run(tmp_path, Handlers(), **options).train()
    assert saved(tmp_path) == ([] if "save_strategy" in options else [f"checkpoint-{NUM_STEPS}"])


def test_the_just_in_time_checkpoint_of_transformers_is_this_one(tmp_path):
    options = {"enable_jit_checkpoint": True, "save_strategy": "no"}
    ended = run(tmp_path, Signals(signal.SIGTERM), **options)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit) as end:
        ended.train()
    assert end.value.code == 75 and saved(tmp_path) == [f"checkpoint-{AT}"]


def test_signals_to_the_group_do_not_reach_the_workers_of_a_data_loader(tmp_path):
    class Groups(TrainerCallback):
        seen: ClassVar[set[int]] = set()

        def on_step_begin(self, args, state, control, **kwargs):
            self.seen |= {os.getpgid(process.pid) for process in psutil.Process().children()}

    elsewhere = {os.getpgid(process.pid) for process in psutil.Process().children()}
    run(tmp_path, Groups(), dataloader_num_workers=1, max_steps=2).train()
    assert Groups.seen - elsewhere and os.getpgrp() not in Groups.seen - elsewhere


def test_a_handler_of_the_users_own_stays(tmp_path):
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    run(tmp_path, Signals(signal.SIGTERM)).train()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert calls == [signal.SIGTERM]


def test_training_in_another_thread_leaves_signals_alone(tmp_path):
    trained = run(tmp_path, max_steps=2)
    thread = threading.Thread(target=trained.train)
    thread.start()
    thread.join()
    assert trained.state.global_step == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hangs(AsyncRule):
    """Answers in the first step, and never again."""

    timeout_s: float = 600.0

    async def score(self, row):
        if row.step:
            asyncio.get_running_loop().call_later(0.1, signal.pthread_kill, threading.main_thread().ident, 15)
            await asyncio.sleep(600)
        return Verdict(1.0)


def test_a_signal_ends_the_calls_of_a_judge_that_hangs_and_the_run_saves(tmp_path, monkeypatch):
    """They are given up within seconds, and the run saves as after any step."""
    monkeypatch.setattr(async_rule, "LAST_S", 0.3)
    rewards = RuleSet([Length(high=4, unit="words"), Hangs()])
    subject = grpo_trainers.trainer(tmp_path, rewards=rewards, max_steps=9, save_strategy="steps", save_steps=100)
    with pytest.raises(SystemExit) as end:
        subject.train()
    assert end.value.code == 75 and (tmp_path / "checkpoint-2").is_dir()
    assert not async_rule._is_ending
