"""Rewards of an evaluation are means over its rows, each of which counts once, whatever batches they come in."""

import statistics
from typing import Any

import pytest
from datasets import Dataset

from tests import grpo_trainers, ppo_trainers, tiny
from tests.nightly import daily
from trl_ext import RuleSet
from trl_ext.rewards import Call

# Rows, rows of a process's batch, completions of a row. TRL logs 2.33, 3.13, 2.75 and 1.0 as the rewards' mean.
BATCHES = [(5, 4, 2), (7, 8, 4), (5, 8, 2), (3, 4, 4)]


def number(row) -> float:
    return float(row.columns["num"])


def odd_number(row) -> float | None:
    """None for even rows."""
    return float(row.columns["num"]) if row.columns["num"] % 2 else None


def of_row(num, log_metric, **_) -> list[float]:
    log_metric("logged", sum(num) / len(num))
    return [float(value) for value in num]


def rules() -> RuleSet:
    """Two rules, whose values the row alone decides."""
    options: dict[str, Any] = dict(columns=("num",), isolate=False)
    return RuleSet([Call(number, **options), Call(odd_number, weight=0.0, **options)])


def held_out(num_rows: int) -> Dataset:
    return Dataset.from_list([{"prompt": tiny.words(5, 6 + i), "num": i} for i in range(num_rows)])


def subject(kind: str, folder, num_rows: int, batch: int, group: int, **changes) -> Any:
    """A trainer that evaluates `num_rows` rows."""
    settings = dict(eval_dataset=held_out(num_rows), data=held_out(8), per_device_eval_batch_size=batch)
    settings |= dict(eval_strategy="steps", eval_steps=1, num_generations_eval=group, max_steps=1) | changes
    if kind == "ppo":
        return ppo_trainers.trainer("head", folder, reward_funcs=[rules(), of_row], **settings)
    return grpo_trainers.trainer(folder, rewards=[rules(), of_row], **settings)


def expected(num_rows: int, group: int) -> dict[str, float]:
    """What an evaluation should log."""
    values = [float(i) for i in range(num_rows) for _ in range(group)]
    mean, odd = statistics.fmean(values), statistics.fmean(range(1, num_rows, 2))
    found = {"reward": 2 * mean, "reward_std": 2 * statistics.stdev(values), "frac_reward_zero_std": 1.0}
    found |= {"rewards/of_row/mean": mean, "rewards/of_row/std": statistics.stdev(values)}
    found |= {"rewards/number/mean": mean, "rewards/odd_number/mean": odd}
    found["rules/odd_number/none_frac"] = 1 - num_rows // 2 / num_rows
    return {f"eval_{name}": value for name, value in found.items()}


@pytest.mark.parametrize(("num_rows", "batch", "group"), BATCHES)
def test_every_row_counts_once(num_rows, batch, group, tmp_path):
    logged = subject("grpo", tmp_path, num_rows, batch, group).evaluate()
    wanted = expected(num_rows, group)
    assert {name: logged[name] for name in wanted} == pytest.approx(wanted)
    assert logged["eval_logged"] == pytest.approx((num_rows - 1) / 2)


@pytest.mark.parametrize("case", daily(BATCHES, BATCHES[0]))
def test_so_it_does_in_ppo(case, tmp_path):
    logged, wanted = subject("ppo", tmp_path, *case).evaluate(), expected(case[0], case[2])
    assert {name: logged[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("metric", ["reward", "rewards/odd_number/mean"])
def test_the_best_checkpoint_is_chosen_by_it(metric, tmp_path):
    best = dict(load_best_model_at_end=True, save_strategy="steps", save_steps=1, metric_for_best_model=metric)
    trainer = subject("grpo", tmp_path, *BATCHES[0], **best)
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(expected(5, 2)[f"eval_{metric}"])


def test_a_stream_counts_by_rows_as_well(tmp_path):
    trainer = subject("grpo", tmp_path, 5, 8, 2, eval_dataset=held_out(5).to_iterable_dataset())
    assert trainer.evaluate()["eval_reward"] == pytest.approx(4.0)
