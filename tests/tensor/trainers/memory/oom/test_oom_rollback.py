"""What a failed forward wrote is taken back, and chunks make one entry."""

from collections import defaultdict
from types import SimpleNamespace

from trl_ext.trainers.memory.oom.rollback import MetricsRollback
from trl_ext.trainers.token_counts import TokenCounts


def trainer(**attributes) -> SimpleNamespace:
    metrics = defaultdict(list, {"kl": [0.5], "num_tokens": [10]})
    return SimpleNamespace(_metrics={"train": metrics}, _tokens=TokenCounts(), **attributes)


def test_everything_since_the_mark_is_taken_back():
    subject = trainer(_step_stats=[1], _total_train_tokens=7)
    subject._tokens.add(1, 2, 3)
    mark = MetricsRollback(subject)
    subject._metrics["train"]["kl"].append(0.7)
    subject._metrics["train"]["entropy"].append(1.0)
    subject._tokens.add(10, 20, 30)
    subject._step_stats.append(2)
    subject._total_train_tokens = 99
    mark.roll_back()
    assert subject._metrics["train"] == {"kl": [0.5], "num_tokens": [10], "entropy": []}
    assert subject._tokens._counts == [1, 2, 3]
    assert subject._step_stats == [1]
    assert subject._total_train_tokens == 7


def merged(name: str, values: list[float], sizes: list[int]) -> list[float]:
    subject = trainer()
    mark = MetricsRollback(subject)
    subject._metrics["train"][name] += values
    mark.merge(sizes)
    return subject._metrics["train"][name]


def test_a_mean_weighs_chunks_by_their_rows():
    assert merged("entropy", [1.0, 4.0], [2, 1]) == [2.0]


def test_a_chunk_without_rows_says_nothing():
    assert merged("accuracy", [1.0, float("nan")], [2, 0]) == [1.0]


def test_extremes_stay_extremes():
    assert merged("clip_ratio/low_min", [0.1, 0.3], [1, 1]) == [0.1]
    assert merged("clip_ratio/high_max", [0.1, 0.3], [1, 1]) == [0.3]
    assert merged("min_reward", [0.1, 0.3], [1, 1]) == [0.1]
    assert merged("max_reward", [0.1, 0.3], [1, 1]) == [0.3]


def test_parts_of_a_sum_over_tokens_add_up():
    assert merged("loss/value_avg", [0.25, 0.5], [1, 1]) == [0.75]


def test_earlier_micro_batches_and_replaced_values_stay():
    assert merged("kl", [1.0, 3.0], [1, 1]) == [0.5, 2.0]
    subject = trainer()
    mark = MetricsRollback(subject)
    subject._metrics["train"]["num_tokens"] = [20]
    mark.merge([1, 1])
    assert subject._metrics["train"]["num_tokens"] == [20]
