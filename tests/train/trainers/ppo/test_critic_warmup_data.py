"""A critic that learns from scored completions of a file before the policy moves."""

import json
import random

import pytest
import torch
from transformers import TrainerCallback

from tests import ppo_trainers, tiny
from tests.ppo_trainers import distance, prompts, resumed_as_whole
from tests.train.trainers.ppo.test_critic_schedule import parts
from trl_ext.errors import ConfigError, DataError
from trl_ext.trainers.ppo.critic.warmup_data import read_warmup_data

torch.set_num_threads(1)


def row(i, prompt):
    return {"prompt": prompt, "completion": tiny.words(*range(5 + i % 3, 9 + i % 4)), "score": float(i % 2)}


def written(folder, rows):
    path = folder / "scored.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def scored(tmp_path):
    return written(tmp_path, [row(i, prompt) for i, prompt in enumerate(prompts(24)["prompt"])])


def started(critic, folder, path, **changes):
    settings = dict(
        critic_warmup_steps=2, critic_warmup_data=path, rollout_func=None, value_normalisation=True, kl_coef=0.0
    )
    return ppo_trainers.trainer(critic, folder, **settings | changes)


class Course(TrainerCallback):
    """Weights and rollouts of each step."""

    def __init__(self, trainer):
        self.trainer, self.parts, self.rollouts = trainer, [parts(trainer)], []
        complete = trainer._complete_rollouts

        def noted(inputs):
            output = complete(inputs)
            self.rollouts.append((inputs, output["completion_ids"].clone(), trainer._scores.clone()))
            return output

        trainer._complete_rollouts = noted
        trainer.add_callback(self)

    def on_step_end(self, *args, **kwargs):
        self.parts.append(parts(self.trainer))


@pytest.mark.parametrize("critic, packing", [("adapter", True), ("head", False), ("separate", True)])
def test_the_critic_learns_from_the_file_and_the_actor_stands_still(critic, packing, scored, tmp_path):
    trainer = started(critic, tmp_path, scored, packing=packing)
    course = Course(trainer)
    trainer.train()
    actors, critics = zip(*course.parts, strict=True)
    assert distance(actors[0], actors[2]) == 0.0
    assert distance(critics[0], critics[1]) > 1e-5 and distance(critics[1], critics[2]) > 1e-5
    assert distance(actors[2], actors[3]) > 0.0
    data = read_warmup_data(scored, 42)
    for number, (inputs, ids, scores) in enumerate(course.rollouts[:2]):
        assert inputs == data.of_update(number, 0, 1, 8)
        assert scores.tolist() == [one["score"] for one in inputs]
        assert tiny.tokenizer().batch_decode(ids, skip_special_tokens=True) == [one["completion"] for one in inputs]
        assert (ids == tiny.tokenizer().eos_token_id).any(dim=1).all()
    assert "score" not in course.rollouts[2][0][0]
    logs = trainer.state.log_history
    assert logs[0]["rewards/score/mean"] == logs[0]["objective/scores"] == course.rollouts[0][2].mean().item()
    assert "rewards/reward/mean" in logs[2] and "rewards/score/mean" not in logs[2]


def test_a_large_file_is_put_in_order_once_an_epoch(scored, monkeypatch):
    shuffled = []
    monkeypatch.setattr(random.Random, "shuffle", lambda self, rows: shuffled.append(len(rows)))
    data = read_warmup_data(scored, seed=random.getrandbits(60))
    for number in range(4):
        data.of_update(number, 1, 2, 8)  # rows 8 to 15, 24 to 31, 40 to 47, 56 to 63 of epochs of 24
    assert shuffled == [24, 24, 24]


def test_without_scores_the_runs_own_rewards_judge_the_file(tmp_path):
    rows = [row(i, prompt) | {"gold": i} for i, prompt in enumerate(prompts(8)["prompt"])]
    for one in rows:
        del one["score"]
    judged = []

    def by_gold(completion_ids, gold=None, **_):
        judged.append(gold)
        return [0.5 if gold is None else gold[i] / 8 for i in range(len(completion_ids))]

    trainer = started("head", tmp_path, written(tmp_path, rows), reward_funcs=by_gold, log_completions=True)
    course = Course(trainer)
    trainer.train()
    assert [sorted(golds) for golds in judged[:2]] == [list(range(8))] * 2
    assert course.rollouts[0][2].tolist() == [gold / 8 for gold in judged[0]]
    assert judged[2] is None


def test_the_critic_explains_the_files_scores_in_the_end(tmp_path):
    rows = [
        {"prompt": prompt, "completion": tiny.words(*[7 + 20 * (i % 2)] * 6), "score": 3.0 * (i % 2)}
        for i, prompt in enumerate(prompts(8)["prompt"])
    ]
    trainer = started(
        "head", tmp_path, written(tmp_path, rows), critic_warmup_steps=16, max_steps=17, value_learning_rate=3e-2,
        cliprange_value=None, max_grad_norm=100.0,
    )  # fmt: skip
    trainer.train()
    explained = [log["ppo/explained_variance"] for log in trainer.state.log_history[:16]]
    assert explained[0] < 0.1 and explained[-1] > 0.5


def test_a_run_that_stops_among_the_files_updates_goes_on_as_if_it_had_not(scored, tmp_path):
    settings = dict(critic_warmup_steps=4, num_ppo_epochs=2, max_steps=6, save_strategy="steps", save_steps=3)
    whole, again = resumed_as_whole(lambda out: started("adapter", out, scored, **settings), tmp_path, 3)
    assert whole._scale == again._scale


def test_two_ranks_take_the_rows_of_one(scored):
    data = read_warmup_data(scored, 42)
    for number in range(5):
        halves = [one for rank in (0, 1) for one in data.of_update(number, rank, 2, 4)]
        assert halves == data.of_update(number, 0, 1, 8)
    first = [one["prompt"] + one["completion"] for number in range(3) for one in data.of_update(number, 0, 1, 8)]
    assert sorted(first) == sorted(one["prompt"] + one["completion"] for one in data.rows)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no line"),
        ("{", "line 1: not a JSON object"),
        ("[1]", "line 1: not a JSON object"),
        ('{"prompt": "a", "completion": "\\ud800"}', "line 1: not a JSON object"),
        ('{"completion": "b"}', "line 1: the prompt is neither"),
        ('{"prompt": "a"}', "line 1: the completion is neither"),
        ('{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', "line 1: the completion is neither"),
        ('{"prompt": "a", "completion": "b", "score": NaN}', "the score is 'nan'"),
        ('{"prompt": "a", "completion": "b", "score": true}', "the score is 'True'"),
        ('{"prompt": "a", "completion": "b", "score": "1"}', "the score is '1'"),
        ('{"prompt": "a", "completion": "b", "score": 1}\n\n{"prompt": "a", "completion": "b"}', "line 3: some lines"),
        (
            '{"prompt": "a", "completion": "b"}\n{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}',
            "line 2: the prompts are text in some lines",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text, words, tmp_path):
    path = tmp_path / "scored.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        read_warmup_data(str(path), 0)


def test_what_cannot_work_with_a_file_is_refused(scored, tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: .*Give a file of JSON lines"):
        started("head", tmp_path, str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="has no effect without critic_warmup_steps"):
        started("head", tmp_path, scored, critic_warmup_steps=0)
    with pytest.raises(ConfigError, match="critic_warmup_steps=2 would end inside an update, which has 4"):
        started("head", tmp_path, scored, num_ppo_epochs=4)
