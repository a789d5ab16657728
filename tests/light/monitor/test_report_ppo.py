"""The report of a PPO run: the score with its rules, KL, value loss and explained variance."""

import re

import pytest

from tests.run_folder import by_name, text_of
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import GRPO, HELD_OUT, PPO
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.summary import Change, summarize

NUM_UPDATES, STEPS = 8, 2  # optimizer steps of an update


def rollout(update):
    """What an update's first optimizer step logs beside `later`."""
    score = update / 10
    return {
        "reward": score + 0.1,
        "rewards/rules/mean": score + 0.1,
        "rewards/answer/mean": score,
        "objective/scores": score,  # less the penalty for a missing EOS
        "objective/kl": 2.0 * score,
        "objective/non_score_reward": -0.1 * score,
        "ppo/explained_variance": score - 0.2,
        "ppo/value_scale_mean": score,
        "ppo/value_scale_std": 0.5 + score,
        "ppo/kl_coef": 0.05,
        "ppo/unscored_frac": 0.0,
        "entropy": 1.0,
    }


def later(step):
    return {
        "step": step,
        "loss": 0.1,
        "loss/policy_avg": 0.0,
        "loss/kl_avg": 0.01 * step,
        "grad_norm": 1.0 + step,
        "loss/value_avg": 1 / step,
        "packing/forwarded_tokens": 100.0,
        "phase/update_s": 2.0,
    }


def held_out(step, score):
    return {
        "step": step,
        "eval_loss": 0.0,
        "eval_reward": score,
        "eval_rewards/answer/mean": score,
        "eval_objective/scores": score,
        "eval_objective/kl": 0.5,
        "eval_loss/value_avg": 0.25,
        "eval_ppo/explained_variance": 0.5 * score,
        "eval_ppo/unscored_frac": 0.0,
        "eval_completions/mean_length": 31.5,
    }


@pytest.fixture
def history():
    steps = []
    for update in range(1, NUM_UPDATES + 1):
        first = (update - 1) * STEPS + 1
        steps += [rollout(update) | later(first), later(first + 1)]
    return [held_out(0, 0.1), *steps, held_out(16, 0.7), {"step": 16, "train_runtime": 80.0}]


def test_the_kind_is_read_from_every_entry_and_steps_without_new_completions_are_training(history):
    assert log_keys.kind_of(history) is PPO
    assert all(log_keys.kind_of([entry]) is PPO for entry in history[:-1])
    assert log_keys.kind_of([{"step": 1, "reward": 0.5, "rewards/answer/mean": 0.5}]) is GRPO
    assert [log_keys.kind_of_entry(entry) is not None for entry in history] == [False, *[True] * 16, False, False]
    assert log_keys.kind_of_entry({"step": 1, "reward": float("nan"), "ppo/unscored_frac": 1.0})


def test_the_table_shows_score_kl_and_critic_in_the_order_of_the_curves(history):
    names = ["score", "answer", "KL", "value loss", "explained variance", "KL coefficient"]
    assert [curve.name for curve in log_keys.values(history[1])] == names
    assert [curve.name for curve in log_keys.values(history[2])] == ["value loss"]
    assert [curve.name for curve in log_keys.values(history[0], HELD_OUT)] == names[:5]
    text = text_of(summarize(history))
    assert "16 steps in 1:20" in text and "first 4 steps" in text
    assert re.search(r"score +0\.15 +0\.75 +0\.10 +0\.70", text)
    assert re.search(r"KL +0\.30 +1\.50 +0\.50 +0\.50", text)
    assert re.search(r"explained variance +-0\.05 +0\.55 +0\.05 +0\.35", text)


def test_the_means_at_the_ends_are_of_whole_updates_and_every_step_counts(history):
    summary = summarize(history)
    assert (summary.num_steps, summary.window_steps) == (16, 4)  # two of eight updates
    training = by_name(summary.training)
    assert (training["score"].before, training["score"].after) == pytest.approx((0.15, 0.75))
    means = sum(1 / step for step in range(1, 5)) / 4, sum(1 / step for step in range(13, 17)) / 4
    assert (training["value loss"].before, training["value loss"].after) == pytest.approx(means)
    assert by_name(summary.held_out)["score"] == Change(0.1, 0.7)
    summary = summarize(history)
    assert (summary.forwarded_tokens, summary.phase_s) == (1600, {"update": 32.0})
    training = by_name(summarize(history[1:3]).training)
    assert training["score"] == Change(0.1, 0.1)
    assert training["value loss"] == Change(0.75, 0.75)


def test_the_report_has_a_panel_for_each_axis(tmp_path, history):
    write_report(tmp_path, history)
    html = (tmp_path / "report.html").read_text()
    headings = re.findall(r"<h2>(.*)</h2>", html)
    others = ["Sample completions", "Time and tokens", "Held-out prompts", "Steps"]
    assert headings == ["Scores", *others]
    panels = re.findall(r'aria-label="(.*) over optimizer steps"', html)
    assert panels == ["Mean score", "KL", "Value loss", "Explained variance"]
    assert "<h1>PPO run</h1>" in html
