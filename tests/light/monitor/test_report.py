"""The report adds up, shows what the log holds, and never needs what it lacks."""

import json
import re
from dataclasses import astuple

import pytest

from tests.run_folder import by_name, text_of
from trl_ext.errors import DataError
from trl_ext.monitor import log_keys
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.record import read_log_history, write_record
from trl_ext.monitor.summary import Change, summarize, token_rows
from trl_ext.monitor.words import duration, scores


def step(number, **metrics):
    answer = number / 20
    return {
        "step": number,
        "reward": answer + 0.1,
        "rewards/rules/mean": answer + 0.1,  # the RuleSet as a whole repeats the total
        "rewards/answer/mean": answer,
        "rewards/answer/std": 0.5,
        "rewards/<b>/mean": 1.0,
        **metrics,
    }


def held_out(number, answer):
    return {"step": number, "eval_reward": answer + 0.2, "eval_rewards/answer/mean": answer, "eval_runtime": 9.0}


@pytest.fixture
def history():
    packed = {
        "packing/forwarded_tokens": 100.0,
        "packing/padded_tokens": 300.0,
        "packing/skipped_tokens": 50.0,
        "packing/forwarded_over_raw": 0.5,
        "phase/generate_s": 3.0,
        "phase/update_s": 1.0,
    }
    steps = [step(number, **packed) for number in range(1, 21)]
    steps[0]["phase/evaluate_s"] = 6.0
    return [held_out(0, 0.25), *steps, held_out(20, 0.75), {"step": 20, "train_runtime": 3725.4}]


def test_training_means_are_those_of_the_first_and_last_five_steps(history):
    summary = summarize(history)
    assert (summary.num_steps, summary.window_steps) == (20, 5)
    assert astuple(by_name(summary.training)["answer"]) == pytest.approx((0.15, 0.9))
    assert astuple(by_name(summary.training)["reward"]) == pytest.approx((0.25, 1.0))


def test_held_out_before_is_step_0_if_there_was_an_evaluation_and_after_is_the_last(history):
    summary = summarize([*history[:10], held_out(9, 0.5), *history[10:]])
    assert by_name(summary.held_out) == {"reward": Change(0.45, 0.95), "answer": Change(0.25, 0.75)}
    assert by_name(summarize(history[1:]).held_out)["answer"] == Change(None, 0.75)


def test_tokens_and_phases_are_totals_over_the_run_and_a_log_every_five_steps_counts_five_times(history):
    summary = summarize(history)
    assert (summary.forwarded_tokens, summary.padded_tokens, summary.raw_tokens) == (2000, 6000, 4000)
    assert summary.phase_s == {"generate": 60.0, "update": 20.0, "evaluate": 6.0}
    assert summary.train_s == 3725.4
    every_fifth = [entry for entry in history[1:21] if entry["step"] % 5 == 0]
    assert summarize(every_fifth).forwarded_tokens == summarize(history).forwarded_tokens
    assert summarize(every_fifth).window_steps == 5  # one entry, the mean of five steps
    assert log_keys.step_s(history[1]) == 4.0


def test_a_rule_is_told_from_the_whole_set_from_the_total_and_from_none(history):
    assert [curve.name for curve in log_keys.values(history[1])] == ["reward", "answer", "<b>"]
    assert "rules" in by_name(log_keys.values({"reward": 0.5, "rewards/rules/mean": 0.4}))
    values = log_keys.values({"reward": 0.5, "rewards/reward/mean": 0.2, "rewards/other/mean": 0.3})
    assert [(curve.name, value) for curve, value in values.items()] == [
        ("reward", 0.5),
        ("reward", 0.2),
        ("other", 0.3),
    ]
    summary = summarize([{"step": 1, "reward": 0.5, "rewards/answer/mean": float("nan"), "rewards/tags/mean": 1.0}])
    assert list(by_name(summary.training)) == ["reward", "tags"]


@pytest.mark.parametrize("log", [[], [{"step": 3, "loss": 0.1}], [{"step": 1, "reward": 0.5}]])
def test_a_history_that_lacks_everything_still_gives_a_report(log):
    assert "tokens" not in text_of(summarize(log))
    assert "<h1>" in report_page(log, RunFacts())


def test_the_table_shows_rewards_tokens_and_time_and_held_out_columns_with_an_evaluation(history):
    text = text_of(summarize(history))
    assert "20 steps in 1:02:05" in text
    assert re.search(r"answer +0\.15 +0\.90 +0\.25 +0\.75", text)
    assert re.search(r"<b> +1\.00 +1\.00 +- +-", text)
    assert "as padded batches: 6,000 (3.00 times as many)" in text
    assert "left out, without advantage: 1,000" in text
    assert "generate 60.0 s (70%)" in text
    assert "held-out" not in text_of(summarize(history[1:21]))


def test_the_report_is_one_escaped_file_without_outside_resources(tmp_path, history):
    write_record(tmp_path, {"model_name_or_path": "<script>alert(1)</script>"}, {"trainer": "grpo"})
    write_report(tmp_path, history)
    html = (tmp_path / "report.html").read_text()
    assert "<script>" not in html and "&lt;script&gt;" in html and "&lt;b&gt;" in html
    assert not re.findall(r"(?:src|href|url)[=(]", html)


def test_the_log_comes_from_the_folder_or_else_from_its_newest_checkpoint(tmp_path):
    for number in (9, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
        state = {"log_history": [{"step": number}]}
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(json.dumps(state))
    assert read_log_history(tmp_path) == [{"step": 100}]
    (tmp_path / "trainer_state.json").write_text('{"log_history": []}')
    assert read_log_history(tmp_path) == []


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_damaged_log_is_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(DataError, match=r"trainer_state\.json"):
        read_log_history(tmp_path)


def test_numbers_read_as_a_person_writes_them():
    assert [duration(s) for s in (0, 129.6, 3600)] == ["0:00", "2:10", "1:00:00"]
    assert scores([("reward", 0.42), ("answer", 0.314), ("format", 1.0)]) == "reward 0.42  answer 0.31  format 1.00"


def test_that_packing_was_off_is_said_in_the_table_and_on_the_page(tmp_path, history):
    padded = [dict(entry, **{"packing/why_off": "its layers <leak>"}) for entry in history]
    summary = write_report(tmp_path, padded)
    assert token_rows(summary)[0] == ["packing is off", "its layers <leak>."]
    page = (tmp_path / "report.html").read_text()
    assert "Packing was off: its layers &lt;leak&gt;" in page
    assert not any("packing is off" in row for row in token_rows(write_report(tmp_path, history)))
