"""Rows are drawn by their running pass rate: near the target most, solved ones rest, the same on resume and ahead."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset

import trl_ext
from tests import grpo_trainers, sampling_servers, tiny
from tests.nightly import daily
from trl_ext.errors import ConfigError

torch.set_num_threads(1)

SIZE, NUM_ROWS = 4, 24


def prompt(number: int) -> str:
    return tiny.words(3 + number, 50)


NUMBERS = {prompt(number): number for number in range(NUM_ROWS)}


def reward(prompts, completion_ids, **_) -> list[float]:
    """Of every four rows two are always solved and one never; half of the completions of the fourth pass."""
    rates = [(1.0, 1.0, 0.0, 0.5)[NUMBERS[text] % 4] for text in prompts]
    return [float(place % 2) if rate == 0.5 else rate for place, rate in enumerate(rates)]


def rows_drawn(trainer) -> list[list[int]]:
    """The rows of each generation, after a training."""
    drawn: list[list[int]] = []
    score = trainer._calculate_rewards

    def noting(inputs, *rest):
        if trainer.model.training:
            drawn.append([NUMBERS[row["prompt"]] for row in inputs[::SIZE]])
        return score(inputs, *rest)

    trainer._calculate_rewards = noting
    return drawn


def made(folder, **changes):
    settings = dict(curriculum={}, gradient_accumulation_steps=4, max_steps=20, rewards=reward)
    settings |= dict(data=Dataset.from_dict({"prompt": list(NUMBERS)}))
    return grpo_trainers.trainer(folder, **settings | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = made(tmp_path_factory.mktemp("run"))
    trainer.drawn = rows_drawn(trainer)
    trainer.train()
    return trainer


def test_rows_near_the_target_are_drawn_most_and_all_are_tried(run):
    assert len(run.drawn) == 20 and all(len(set(rows)) == len(rows) == 4 for rows in run.drawn)
    visits = np.bincount([row for rows in run.drawn for row in rows], minlength=NUM_ROWS)
    assert visits.min() >= 1
    assert visits[3::4].mean() > 2 * max(visits[kind::4].mean() for kind in (0, 1, 2))


def test_metrics_are_of_the_rows_that_were_drawn(run):
    log, seen = grpo_trainers.steps_of(run), set()
    for entry, rows in zip(log, run.drawn, strict=True):
        kinds = [(1.0, 1.0, 0.0, 0.5)[row % 4] for row in rows]
        assert entry["curriculum/pass_rate_mean"] == pytest.approx(np.mean(kinds))
        assert entry["curriculum/unseen_frac"] == pytest.approx(len({*rows} - seen) / 4)
        seen |= {*rows}


def curriculum_of(entry: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if key.startswith("curriculum/")}


RESUMED = {
    "plain": {},
    "spares": dict(oversample=1.5),
    "between two updates of a generation": dict(steps_per_generation=8),
    "each generation trained on twice": dict(num_iterations=2),
}


@pytest.mark.parametrize("name", daily(RESUMED, "spares"))
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    options = RESUMED[name] | dict(max_steps=9, save_strategy="steps", save_steps=5)
    whole, again = (made(tmp_path / name, **options) for name in ("whole", "again"))
    drawn, drawn_again = rows_drawn(whole), rows_drawn(again)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert torch.equal(grpo_trainers.weights(again), grpo_trainers.weights(whole))
    assert 0 < len(drawn_again) < len(drawn) and drawn[-len(drawn_again) :] == drawn_again
    logs = [[curriculum_of(entry) for entry in grpo_trainers.steps_of(trainer)] for trainer in (whole, again)]
    assert logs[0] == logs[1] and any(logs[0])


def test_rows_that_are_generated_ahead_are_drawn_by_what_was_known_a_block_before(tmp_path, monkeypatch):
    servers = sampling_servers.install(monkeypatch)
    options = dict(generation_ahead=1, use_vllm=True, vllm_mode="server", rollout_func=None, max_completion_length=6)
    options |= dict(save_strategy="steps", save_steps=3, max_steps=6)
    whole = made(tmp_path / "whole", **options)
    drawn = rows_drawn(whole)
    whole.train()
    assert all(not {*now} & {*following} for now, following in pairwise(drawn))  # one is not known, as it is trained
    assert sum(kind == "generate" for kind, _ in servers.last.events) == 1 + 5 * 4  # none was thrown away
    again = made(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(grpo_trainers.weights(again), grpo_trainers.weights(whole))


def test_an_evaluation_draws_and_learns_nothing(run, tmp_path):
    evaluated = made(
        tmp_path, eval_dataset=Dataset.from_dict({"prompt": list(NUMBERS)[:2]}), eval_strategy="steps", eval_steps=1
    )
    drawn = rows_drawn(evaluated)
    evaluated.train()
    assert drawn == run.drawn


def test_a_threshold_that_nothing_reaches_is_said_once(tmp_path, caplog):
    made(tmp_path, curriculum={"threshold": 2}, max_steps=22).train()
    assert sum("no completion of 20 generations" in record.message for record in caplog.records) == 1


def test_a_checkpoint_of_other_rows_is_a_sentence(tmp_path):
    made(tmp_path / "whole", max_steps=1, save_strategy="steps", save_steps=1).train()
    other = made(tmp_path / "other", data=Dataset.from_dict({"prompt": list(NUMBERS)[:20]}), resume_despite="data")
    with pytest.raises(ConfigError, match="knows 24 rows by number, and the dataset has 20"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))


REFUSED = [
    ("target", "must be a mapping"),
    ({"targt": 0.5}, "'targt', which is unknown. Its keys are target, threshold"),
    *(({"target": value}, "must lie between 0 and 1") for value in (0, 1, -0.5, 2)),
    *(({"target": value}, "must be a number") for value in ("half", None, True, float("nan"))),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=str)
def test_values_that_cannot_be_are_refused(given, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        trl_ext.GRPOConfig(str(tmp_path), curriculum=given, **tiny.QUIET_ON_CPU)


def test_a_fixed_order_and_a_stream_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="shuffle_dataset=False keeps the data's"):
        made(tmp_path, shuffle_dataset=False)
    stream = Dataset.from_dict({"prompt": list(NUMBERS)}).to_iterable_dataset()
    with pytest.raises(ConfigError, match="by number, and a stream or an environment has no numbers"):
        made(tmp_path, data=stream)
