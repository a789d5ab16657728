"""Rules of judges in a GRPO step: criteria of each row, checked before the first one, and groups."""

import json
import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests import ppo_trainers, tiny
from tests.chat_server import ChatServer, shown
from tests.grpo_trainers import trainer
from tests.rules import rule_class
from trl_ext import RuleSet
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Length
from trl_ext.trainers.grpo.rewards import check_groups

GOOD = [
    {"criterion": "Has an even length.", "points": 5, "tags": ["axis:form"]},
    {"criterion": "Shouts.", "points": -1, "tags": ["axis:tone"]},
]


@pytest.fixture(scope="module")
def server():
    with ChatServer() as server:
        yield server


@pytest.fixture
def rules(tmp_path, server):
    server.answers(lambda request: json.dumps({"met": {"1": len(shown(request)) % 2 == 0, "2": True}}))
    file = tmp_path / "rules.yaml"
    file.write_text(f"rules: [{{rule: rubric, model: m, base_url: '{server.url}', criteria: rubrics}}]\n")
    return [RuleSet.from_yaml(file)]


def data(num_rows=24, **of_rows):
    """Rows with criteria; `of_rows` gives those of some rows, by their numbers."""
    cells = [of_rows.get(f"row_{number}", GOOD) for number in range(num_rows)]
    return Dataset.from_dict({"prompt": [tiny.words(5, 3 + number) for number in range(num_rows)], "rubrics": cells})


def test_criteria_of_each_row_are_the_reward_of_a_step(rules, server, tmp_path):
    subject = trainer(tmp_path, rewards=rules, data=data(), per_device_train_batch_size=8, max_steps=1)
    subject.train()
    (log,) = [entry for entry in subject.state.log_history if "reward" in entry]
    met = log["rules/rubric/met/axis:form"]
    assert log["rules/rubric/met/axis:tone"] == 1.0 and log["rules/rubric/met_frac"] == pytest.approx((met + 1) / 2)
    assert log["reward"] == pytest.approx(met * 0.8, abs=1e-6)
    assert 1 < len(server.requests) <= 8 and "1. Has an even length.\n2. Shouts." in shown(server.requests[0])


def test_a_row_whose_criteria_cannot_be_read_is_named_before_the_first_step(rules, server, tmp_path, caplog):
    """What makes criteria readable, the table of tests/light/rewards/rules/test_rubric.py says."""
    logging.getLogger("trl_ext").propagate = True
    with caplog.at_level("WARNING"):
        trainer(tmp_path, rewards=rules, data=data(row_20=[GOOD[1]]))
    assert "(row 20): gold_invalid: column 'rubrics': none has points above 0" in caplog.text and not server.requests


def test_a_column_of_another_shape_ends_the_run_before_the_first_step(rules, server, tmp_path):
    rows = data().remove_columns("rubrics").add_column("rubrics", ["Be kind."] * 24)
    with pytest.raises(DataError, match="rule 'rubric' can read the gold of none of the 24 rows") as failed:
        trainer(tmp_path, rewards=rules, data=rows)
    assert "'Be kind.' is no list of 1 to 100 criteria" in str(failed.value) and not server.requests


# Groups --------------------------------------------------------------------------------------------------------------


Longest = rule_class("Longest", lambda row: all(len(row.text) >= len(one.text) for one in row.group), reads_group=True)


def test_a_group_that_processes_share_is_refused(tmp_path):
    compare = RuleSet([Length(high=3), Longest(name="compare")])
    args = SimpleNamespace(num_generations=4, num_generations_eval=None, eval_strategy="no", world_size=2)
    args.per_device_eval_batch_size, args.generation_batch_size = 3, 16
    for rules in ([compare], compare.split(), [len]):
        check_groups(rules, args)
    args.generation_batch_size = 12
    check_groups([RuleSet([Length(high=3)])], args)
    for rules in ([compare], compare.split()):
        with pytest.raises(ConfigError, match=r"'compare' reads the group of a completion.*a process has 6 rows"):
            check_groups(rules, args)
    args.generation_batch_size, args.eval_strategy = 16, "steps"
    with pytest.raises(ConfigError, match="num_generations=4, and a process has 3 rows"):
        check_groups([compare], args)
    args.num_generations_eval = 1
    check_groups([compare], args)
    with pytest.raises(ConfigError, match="num_generations=1"):
        ppo_trainers.trainer("separate", tmp_path, reward_funcs=[compare])
