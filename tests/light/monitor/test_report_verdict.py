"""The verdict says what the numbers say, and warns where a person would look twice."""

import io
import math
import re

import pytest
from rich.console import Console

from tests.run_folder import entry
from trl_ext.monitor.log_keys import read_series
from trl_ext.monitor.pages.report import summary_table, write_report
from trl_ext.monitor.pages.verdict import judge_run
from trl_ext.monitor.record import RunRecord, write_record
from trl_ext.monitor.summary import summarize, token_rows
from trl_ext.monitor.words import from_to


def judged(log, max_steps=None, measures=()):
    return judge_run(log, read_series(log), summarize(log), max_steps, measures)


def rewards(values, **others):
    return [{"step": step, "reward": value, **others} for step, value in enumerate(values, start=1)]


def warned(values):
    return " ".join(judged(values).warnings)


def test_the_mood_is_that_of_the_reward_beyond_its_noise():
    noise = [0.50, 0.20, 0.80, 0.40, 0.75, 0.25, 0.60, 0.35, 0.70, 0.45, 0.55, 0.65]
    for mood, runs in {
        "better": [[number / 20 for number in range(20)]],
        "worse": [[1 - number / 20 for number in range(20)]],
        "same": [[0.5] * 20, [0.5 + (-1) ** number * 0.3 for number in range(20)], noise],
        "unknown": [[0.5], [-0.157, -0.161, -0.161], [0.1, 0.9]],
    }.items():
        assert [judged(rewards(values)).mood for values in runs] == [mood] * len(runs)


def test_a_run_of_three_steps_is_too_short_for_a_verdict():
    verdict = judged(rewards([-0.157, -0.161, -0.161], **{"rewards/a/mean": 0.1}))
    assert verdict.headline == "Reward went from -0.157 to -0.161 in training: 3 logged steps are too little to judge"
    opposed = [entry | {"rewards/truth/mean": 1 - entry["reward"]} for entry in rewards([0.1, 0.5, 0.9])]
    assert not warned(opposed)  # that a rule was outbid would be a verdict, too


def test_two_numbers_of_a_change_never_look_alike():
    assert from_to(0.42, 0.55) == "from 0.42 to 0.55" and from_to(0.5, 0.5) == "from 0.50 to 0.50"
    assert from_to(-0.1571, -0.1609) == "from -0.157 to -0.161"
    assert from_to(1.00001, 1.00002) == "from 1.00001 to 1.00002"


def test_held_out_rows_have_the_last_word_and_an_accuracy_is_judged_like_a_reward():
    log = [{"step": 0, "eval_reward": 0.5}, *rewards([0.1] * 8 + [0.9] * 8), {"step": 16, "eval_reward": 0.3}]
    assert judged(log).headline == "It got worse: reward fell from 0.50 to 0.30 on held-out problems"
    log = [{"step": step, "accuracy": step / 20, "loss": 1.0} for step in range(1, 21)]
    assert judged(log).headline == "It learned: accuracy rose from 0.15 to 0.90 in training"


def test_steps_whose_rewards_are_nan_are_counted():
    log = rewards([0.5, 0.6, math.nan, math.nan], **{"completions/mean_length": 5.0})
    assert judged(log).warnings[0].startswith("In 2 of 4 logged steps no completion had a reward: every reward")
    assert "no completion had a reward" not in warned(rewards([0.5, 0.6], **{"completions/mean_length": 5.0}))


def test_tokens_that_packing_did_not_save_are_not_shown():
    for forwarded, names in ((100, ["tokens forwarded", "as padded batches"]), (120, ["tokens forwarded"])):
        counts = {"packing/forwarded_tokens": float(forwarded), "packing/padded_tokens": 110.0}
        log = rewards([0.5], **counts)
        assert [name for name, _ in token_rows(summarize(log))] == names


def test_the_ending():
    for end, max_steps, ending, is_finished in (
        ([{"step": 2, "train_runtime": 5.0}], 2, "Finished: 2 of 2 steps in 0:05", True),
        ([{"step": 2, "train_runtime": 5.0}], 9, "Ended early: 2 of 9 steps in 0:05", False),
        ([], 9, "Stopped or still running: 2 of 9 steps", False),
        ([], None, "Stopped or still running: 2 steps", False),
        ([{"step": 2, "loss": math.nan}], 2, "Failed: 2 of 2 steps", False),
    ):
        verdict = judged([*rewards([0.1, 0.2]), *end], max_steps)
        assert (verdict.ending, verdict.is_finished) == (ending, is_finished)


def test_a_healthy_run_has_no_warning_and_many_of_a_kind_are_counted():
    assert judged([entry(step, 20) for step in range(1, 21)]).warnings == ()
    failed = {f"rules/rule_{number}/error_frac": 0.5 for number in range(20)}
    warnings = judged(rewards([0.1, 0.2], **failed)).warnings
    assert len(warnings) == 8 and warnings[-1] == "And 13 more of the kind."


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"completions/clipped_ratio": 0.3}, "30% of the last completions were cut off at max_completion_length."),
        ({"frac_reward_zero_std": 0.8}, "In 80% of the last groups all completions earned the same"),
        ({"frac_reward_zero_std": 0.8}, "neither too easy nor too hard, or raise num_generations."),
        ({"kl": 3.0}, "KL to the reference reached 3.00 nats per token in step 1"),
        ({"objective/kl": 200.0, "completions/mean_length": 50.0}, "reached 4.00 nats per token in step 1"),
        ({"rules/code/timeout_frac": 0.2}, "Rule 'code' ran out of time or memory on 20.0% of completions."),
        ({"rules/code/error_frac": 0.001}, "Rule 'code' failed on 0.1% of completions."),
        ({"grad_norm": math.inf}, "grad_norm was inf in step 1"),
        (
            {"memory/update_gib": 44.0, "memory/predicted_update_gib": 40.0},
            "Phase update took 44.0 GiB where 40.0 were planned (+10.0%).",
        ),
    ],
)
def test_what_deserves_a_second_look_is_a_sentence(others, sentence):
    assert sentence in warned(rewards([0.1, 0.2, 0.3, 0.4], **others))
    assert not warned(rewards([0.1, 0.2, 0.3, 0.4]))


def test_a_collapse_of_entropy_and_a_critic_worse_than_the_mean_are_told():
    log = [entry | {"entropy": 2.0 * 0.5**number} for number, entry in enumerate(rewards([0.1] * 20))]
    assert "Entropy fell from 0.78 to 2.4e-05: completions hardly differ. Lower learning_rate" in warned(log)
    learned = [
        entry | {"entropy": 2.0 * 0.5**number} for number, entry in enumerate(rewards([n / 20 for n in range(20)]))
    ]
    assert "Entropy" not in warned(learned), "a policy that has learned is sure of its answers"
    log = [{"step": step, "objective/scores": 0.1 * step, "loss/value_avg": 1.0} for step in range(1, 5)]
    assert "explained variance ended at -0.50" in warned([e | {"ppo/explained_variance": -0.5} for e in log])


def test_an_entropy_that_one_update_takes_is_told_and_a_slow_fall_is_not():
    """Numbers of the quickstart's model at a rate of 1e-3, where it collapsed, and of 4e-5, where it learned."""
    collapsed, learned = [2.12, 0.18, 0.23, 0.14, 0.29, 0.32], [2.06, 1.97, 1.48, 1.18, 0.88, 0.49, 0.33, 0.25, 0.21]
    first, second = (
        warned([entry | {"entropy": value} for entry, value in zip(rewards([0.1] * len(values)), values, strict=True)])
        for values in (collapsed, learned)
    )
    sentence = "Entropy fell from 2.12 to 0.18 by one update, in step 1: completions hardly differed from there on."
    assert f"{sentence} Lower learning_rate." in first and "Entropy" not in second
    rose = judged([one | {"entropy": value} for one, value in zip(rewards(collapsed[::-1]), collapsed, strict=True)])
    assert rose.headline.startswith("The policy collapsed, though reward rose from 0.") and rose.mood == "worse"
    rare = [
        entry | {"step": 10 * entry["step"], "entropy": value}
        for entry, value in zip(rewards([0.1] * 6), collapsed, strict=True)
    ]
    assert "Entropy" not in warned(rare), "ten updates between two entries"


def test_a_rule_that_falls_while_the_reward_rises_is_told():
    log = [entry | {"rewards/truth/mean": 1 - entry["reward"]} for entry in rewards([n / 20 for n in range(20)])]
    assert "Rule 'truth' fell by 0.75 while the reward rose by 0.75: is it outbid?" in warned(log)
    noisy = [entry | {"rewards/noise/mean": (7 * entry["step"]) % 11 / 10} for entry in log]
    assert "noise" not in warned(noisy)


def test_a_rule_that_falls_on_held_out_rows_is_told_unless_it_rose_in_training():
    """A rule that the model hardly kept at first has no room to fall beyond the noise of training."""
    log = [entry | {"rewards/truth/mean": 0.1} for entry in rewards([n / 20 for n in range(20)])]
    ends = {0: {"eval_reward": 0.2, "eval_rewards/truth/mean": 0.13}}
    ends[20] = {"eval_reward": 0.9, "eval_rewards/truth/mean": 0.05}
    evaluated = [*log, *({"step": step} | numbers for step, numbers in ends.items())]
    sentence = "Rule 'truth' fell by 0.0800 while the reward rose by 0.70 on held-out rows: is it outbid?"
    assert sentence in warned(evaluated) and "outbid" not in warned(log)
    rising = [one | ({"rewards/truth/mean": one["reward"]} if "reward" in one else {}) for one in evaluated]
    assert "outbid" not in warned(rising)


def test_a_reward_model_that_overfits_or_judges_length_is_told():
    log = [{"step": 5, "accuracy": 0.95, "loss": 0.1}]
    log += [{"step": 5, "eval_accuracy": 0.7, "eval_score_length_correlation": 0.8}]
    assert "it overfits" in warned(log) and "does it judge length?" in warned(log)


def parted(held_out, training=None, measures=("rewards/truth/mean",), name="rewards/truth/mean"):
    """The warnings on 24 steps with an evaluation before, every eight, and at the end."""
    log = rewards([number / 24 for number in range(24)] if training is None else training)
    log += [{"step": 8 * number, f"eval_{name}": value} for number, value in enumerate(held_out)]
    log.sort(key=lambda one: one["step"])
    return [one for one in judged(log, measures=measures).warnings if "they part" in one]


def test_a_reward_that_rises_while_a_held_out_measure_falls_is_told():
    assert parted([0.40, 0.62, 0.58, 0.50]) == [
        "Held-out truth fell from 0.62 in step 8 to 0.50 while the reward in training rose by 0.50: they part. The "
        "policy learns what pays and not what is measured: take the model of step 8, and mend the reward."
    ]
    assert parted([0.62, 0.50]) and parted([0.4, 0.6, 0.5, 0.5], name="reward", measures=())
    assert not parted([0.40, 0.62, 0.60, 0.61])  # within 0.05
    assert not parted([0.40, 0.50, 0.62])
    assert not parted([0.40, 0.62, 0.58, 0.50], training=[0.5] * 24)
    assert not parted([0.40, 0.62, 0.58, 0.50], training=[0.1 * (number % 2) for number in range(24)])
    assert not parted([0.40, 0.50, 0.62, 0.50], training=[0.04 * min(number, 16) for number in range(24)])
    assert not parted([0.40, 0.62, 0.58, 0.50], measures=())  # a rule that is rewarded may fall for a better one


def test_measures_are_rules_of_weight_0_and_what_chooses_the_best_model():
    rules = [{"rule": "answer", "weight": 0}, {"rule": "tags", "name": "t", "weight": 0.0}, {"rule": "math"}]
    assert RunRecord({}, {}, {"rules": rules}).measures == ["rewards/answer/mean", "rewards/t/mean"]
    for best, measures in (("eval_rewards/x/mean", ["rewards/x/mean"]), ("loss", []), (None, [])):
        assert RunRecord({"metric_for_best_model": best}, {}).measures == measures
    assert RunRecord({"metric_for_best_model": "rewards/x/mean", "greater_is_better": False}, {}).measures == []


def test_page_and_console_know_the_measures_from_the_runs_folder(tmp_path):
    log = rewards([number / 24 for number in range(24)])
    log += [
        {"step": 8 * number, "eval_rewards/answer/mean": value} for number, value in enumerate([0.4, 0.6, 0.5, 0.5])
    ]
    rules = {"rules": [{"rule": "repetition"}, {"rule": "answer", "weight": 0}]}
    for weight, is_said in ((0, True), (1, False)):
        rules["rules"][1]["weight"] = weight
        write_record(str(tmp_path), {"max_steps": 24}, {"trainer": "grpo"}, rules, None)
        summary = write_report(tmp_path, log)
        console = Console(width=300, record=True, file=io.StringIO())
        console.print(summary_table(summary, log, tmp_path))
        for said in ((tmp_path / "report.html").read_text(), console.export_text()):
            assert ("Held-out answer fell from 0.60 in step 8 to 0.50" in said) == is_said


def test_who_waits_for_whom_is_told_where_samples_are_generated_ahead():
    for generation_s, waited_s, words in (
        (9.0, 5.0, "Training waited 50% of the time"),
        (4.0, 0.0, "were idle 60%"),
        (8.0, 1.0, ""),
    ):
        phases = {"phase/update_s": 10.0 - waited_s, "phase/generate_wait_s": waited_s}
        log = rewards([0.1, 0.5, 0.9], **phases, **{"sampling/generation_s": generation_s})
        assert words in warned(log) and bool(words) == ("vLLM" in warned(log))


CARDS = {"cards": ["NVIDIA A40"], "packages": {"torch": "2.13.0"}}
WITH_VLLM = {"cards": ["NVIDIA A40"], "packages": {"vllm": "0.31.0"}}


@pytest.mark.parametrize(
    ("recipe", "versions", "names"),
    [
        ({}, {}, ["max_completion_length"]),
        ({"use_cpu": True}, CARDS, ["max_completion_length"]),
        ({}, CARDS, ["cache_implementation: static", "pip install vllm"]),
        ({"cache_implementation": "static"}, CARDS, ["pip install vllm"]),
        ({"use_transformers_continuous_batching": True}, CARDS, ["pip install vllm"]),
        ({}, WITH_VLLM, ["use_vllm: true"]),
        ({"use_vllm": True}, WITH_VLLM, ["generation_ahead: 1"]),
    ],
)
def test_where_generation_takes_most_of_the_step_a_setting_shortens_it(recipe, versions, names, tmp_path):
    versions = {"trainer": "grpo", "cards": [], "packages": {}, **versions}
    record = RunRecord(recipe, versions)
    write_record(tmp_path, recipe, versions)
    seconds = {"phase/generate_s": 6.1, "phase/update_s": 3.9, "phase/evaluate_s": 90.0}
    log = rewards([0.5] * 8, **seconds)
    write_report(tmp_path, log)
    page, out = (tmp_path / "report.html").read_text(), io.StringIO()
    Console(file=out, width=500).print(summary_table(summarize(log), log, tmp_path))
    for text in (page, out.getvalue()):
        assert "Generation took 61% of the time." in text and all(name in text for name in names)
    advised = {"cache_implementation: static", "use_vllm: true", "max_completion_length", "generation_ahead: 1"}
    others = advised.difference(names) - ({"use_vllm: true"} if "pip install vllm" in names else set())
    assert not any(name in record.faster_generation for name in others)
    shorter = rewards([0.5] * 8, **seconds | {"phase/update_s": 6.2})
    write_report(tmp_path, shorter)
    assert "Generation took" not in (tmp_path / "report.html").read_text()


def test_samples_that_come_ahead_need_no_faster_generation():
    assert not RunRecord({"use_vllm": True, "generation_ahead": 1}, WITH_VLLM).faster_generation


def test_a_rule_without_answers_is_named_once_where_the_run_was_evaluated():
    shares = {f"{prefix}rules/answer/no_answer_frac": 1.0 for prefix in ("", "eval_")}
    warnings = judged(rewards([0.1, 0.2], **shares)).warnings
    assert [one[:46] for one in warnings] == ["Rule 'answer' found no answer in 100% of the l"]


def test_a_cause_comes_before_what_follows_from_it():
    """A policy that collapsed, or is cut off, finds no answers, and then earns the same in every group."""
    follows = {"rules/answer/no_answer_frac": 1.0, "frac_reward_zero_std": 1.0}
    no_answer, same = "Rule 'answer' found no answer", "In 100% of the last groups all completions"
    for cause, first in (
        ({"completions/clipped_ratio": 0.9}, "90% of the last completions were cut off"),
        ({"kl": 3.0}, "KL to the reference reached"),
        ({}, no_answer),
    ):
        warnings = judged(rewards([0.1, 0.2], **(follows | cause))).warnings
        assert warnings[0].startswith(first) and len(warnings) == len(cause) + 2
        assert warnings[-2].startswith(no_answer) and warnings[-1].startswith(same)
    some = judged(rewards([0.1, 0.2], **follows, **{"completions/clipped_ratio": 0.4})).warnings
    assert some[0].startswith(no_answer) and some[-1].startswith("40% of the last completions were cut off")
    collapsed = [one | follows | {"entropy": 2.0 * 0.5**number} for number, one in enumerate(rewards([0.1] * 20))]
    assert judged(collapsed).warnings[0].startswith("Entropy fell")


def test_every_warning_ends_on_what_to_do_and_names_no_page():
    """A wheel has no pages, so the remedy is in the sentence; a run that got worse without a warning has one, too."""
    others = {"completions/clipped_ratio": 0.3, "kl": 3.0, "rules/code/timeout_frac": 0.2, "loss": math.nan}
    others |= {"rules/code/error_frac": 0.1, "rules/code/none_frac": 0.1, "rules/answer/no_answer_frac": 0.9}
    log = [one | {"rewards/truth/mean": 1 - one["reward"]} | others for one in rewards([n / 20 for n in range(20)])]
    worse = judged(rewards([1 - number / 20 for number in range(20)]))
    still = judged([one | {"grad_norm": 0.0} for one in rewards([0.5] * 8)])
    warnings = [*judged(log).warnings, *worse.warnings, *still.warnings]
    assert len(warnings) >= 9 and worse.mood == still.mood == "worse" and worse.warnings and still.warnings
    verbs = r"\b(?:Resume|Lower|Raise|Give|Change|Read|Choose|Then change|take|shows)\b"
    assert not [one for one in warnings if not re.search(verbs, one) or ".md" in one]
