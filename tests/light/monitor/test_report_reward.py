"""The report of a reward model's run: accuracy, margin and loss where a GRPO run shows its rewards."""

import re

import pytest

from tests.run_folder import by_name, text_of
from trl_ext.monitor import log_keys
from trl_ext.monitor.log_keys import GRPO, HELD_OUT, REWARD_MODEL
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.summary import Change, summarize


def step(number):
    return {
        "step": number,
        "loss": 0.8 - number / 100,
        "accuracy": 0.5 + number / 200,
        "margin": number / 10,
        "min_reward": -1.0,
        "mean_reward": 0.1,
        "max_reward": 1.0,
        "num_tokens": 500.0 * number,
        "grad_norm": 1.0,
        "packing/forwarded_tokens": 100.0,
        "packing/padded_tokens": 150.0,
        "packing/forwarded_over_raw": 0.8,
        "phase/update_s": 2.0,
    }


def held_out(number, accuracy, disagree, correlation):
    return {
        "step": number,
        "eval_loss": 1 - accuracy,
        "eval_accuracy": accuracy,
        "eval_margin": accuracy - 0.5,
        "eval_mean_reward": 0.2,
        "eval_accuracy_rules_agree": 0.9,
        "eval_accuracy_rules_disagree": disagree,
        "eval_rules_agree_frac": 0.8,
        "eval_score_length_correlation": correlation,
        "eval_runtime": 3.0,
    }


@pytest.fixture
def history():
    steps = [step(number) for number in range(5, 45, 5)]  # a log entry every five steps
    return [held_out(0, 0.5, 0.4, 0.0), *steps, held_out(40, 0.875, 0.25, 0.3), {"step": 40, "train_runtime": 80.0}]


def test_the_kind_is_read_from_the_log_and_training_told_from_evaluation(history):
    assert log_keys.kind_of(history) is REWARD_MODEL
    assert log_keys.kind_of(history[:1]) is REWARD_MODEL  # stopped after the first evaluation
    assert log_keys.kind_of([{"step": 1, "reward": 0.5, "accuracy": 0.5}]) is GRPO  # a metric of the user's own
    assert log_keys.kind_of([{"step": 1, "loss": 0.5}]) is GRPO
    assert [log_keys.kind_of_entry(entry) is not None for entry in history] == [False, *[True] * 8, False, False]
    held_out = [log_keys.kind_of_entry(entry, log_keys.HELD_OUT) is not None for entry in history]
    assert held_out == [True, *[False] * 8, True, False]


def test_the_table_shows_accuracy_margin_and_loss_in_the_order_of_the_curves(history):
    names = ["accuracy", "if rules agree", "if rules disagree", "margin", "loss", "mean score"]
    assert [curve.name for curve in log_keys.values(history[0], HELD_OUT)][:6] == names
    assert [curve.name for curve in log_keys.values(history[1])] == ["accuracy", "margin", "loss", "mean score"]
    text = text_of(summarize(history))
    assert "40 steps in 1:20" in text and "first 10 steps" in text
    assert re.search(r"accuracy +0\.54 +0\.69 +0\.50 +0\.88", text)
    assert re.search(r"if rules disagree +- +- +0\.40 +0\.25", text)
    assert re.search(r"margin +0\.75 +3\.75 +0\.00 +0\.38", text)
    assert "as padded batches: 6,000 (1.50 times as many)" in text
    assert "reward" not in text


def test_both_ends_of_the_run_are_summed_up(history):
    summary = summarize(history)
    assert (summary.num_steps, summary.window_steps) == (40, 10)  # two entries of five steps
    training, evaluated = by_name(summary.training), by_name(summary.held_out)
    assert (training["accuracy"].before, training["accuracy"].after) == pytest.approx((0.5375, 0.6875))
    assert evaluated["if rules disagree"] == Change(0.4, 0.25)
    assert evaluated["score-length correlation"] == Change(0.0, 0.3)
    assert (summary.forwarded_tokens, summary.padded_tokens, summary.raw_tokens) == (4000, 6000, 5000)
    assert summary.phase_s == {"update": 80.0}


def test_the_report_has_the_curves_the_pairs_if_there_are_some_and_the_steps(tmp_path, history):
    write_report(tmp_path, history)
    html = (tmp_path / "report.html").read_text()
    headings = re.findall(r"<h2>(.*)</h2>", html)
    assert headings == ["Reward model", "Time and tokens", "Held-out pairs", "Steps"]
    panels = re.findall(r'aria-label="(.*) over optimizer steps"', html)
    assert panels == ["Accuracy", "Margin", "Loss"]
    html = report_page(history[1:9], RunFacts()).partition("<footer>")[0]
    assert "Held-out" not in html and "held-out" not in html and "rules" not in html
