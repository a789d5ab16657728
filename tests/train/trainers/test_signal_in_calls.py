"""SIGTERM while a judge hangs: its calls are given up within seconds, and the run saves as after any step."""

import asyncio
import signal
import threading
from dataclasses import dataclass

import pytest

from tests import grpo_trainers
from trl_ext import RuleSet
from trl_ext.rewards import Length, Verdict
from trl_ext.rewards.rules import async_rule
from trl_ext.rewards.rules.async_rule import AsyncRule


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
    monkeypatch.setattr(async_rule, "LAST_S", 0.3)
    rewards = RuleSet([Length(high=4, unit="words"), Hangs()])
    subject = grpo_trainers.trainer(tmp_path, rewards=rewards, max_steps=9, save_strategy="steps", save_steps=100)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray leaves a handler in the process of the tests
    with pytest.raises(SystemExit) as end:
        subject.train()
    signal.signal(signal.SIGTERM, before)
    assert end.value.code == 75 and (tmp_path / "checkpoint-2").is_dir()
    assert not async_rule._is_ending
