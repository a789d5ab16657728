"""Reward functions of other projects as rules, by the files that the page shows."""

import json
import re
import sys
from itertools import count

import pytest
import yaml

from tests.documents import BLOCKS, ROOT
from trl_ext import RuleSet
from trl_ext.scripts.rewards import build_rewards

PAGE = "docs/reference/own_rules.md"
PRINTED = {
    name.removeprefix("# "): text
    for name, text in (block.text.split("\n", 1) for block in BLOCKS if block.page == PAGE)
    if name.startswith("# ")
}
# As both projects call them: verl 0.10.0.dev's naive manager, OpenRLHF 0.11.0's single-turn executor.
STUBS = {
    "my_verl_reward.py": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("sums", {"index": 0})
    right = float(solution_str.endswith(ground_truth))
    return {"score": right, "acc": right} if "18" in solution_str else right
""",
    "my_openrlhf_reward.py": """
import torch

def reward_func(queries, prompts, labels):
    answers = [query.removeprefix("9 * 2 =") for query in queries]
    rewards = torch.tensor([float(label in answer) for answer, label in zip(answers, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}} if "18" in queries[0] else rewards
""",
}


def rules_of(module, **fields):
    """The rules that the page shows of a module."""
    shown = re.findall(rf"`({{rule: call, function: {module}\.[^`]*}})`", (ROOT / PAGE).read_text())
    return RuleSet.from_dict({"rules": [yaml.safe_load(one) | fields for one in shown]})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the page's files and the functions that they import; no module of it stays."""
    for name, text in (PRINTED | STUBS).items():
        if "." in name:
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in [one for one in sys.modules if f"{one}.py" in PRINTED | STUBS and one not in before]:
        del sys.modules[name]


def test_functions_for_verl_and_openrlhf_are_rules(folder):
    rules = rules_of("theirs")
    row = {"data_source": "sums", "reward_model": {"ground_truth": "18"}, "extra_info": {"index": 0}, "answer": "18"}
    columns = {name: [cell] * 2 for name, cell in row.items()}
    for prompt in ("9 * 2 =", [{"role": "user", "content": "9 * 2 ="}]):
        assert rules(prompts=[prompt] * 2, completions=["A: 18", "A: 17"], **columns) == [2.0, 0.0]
    rules.close()


def test_a_task_of_reasoning_gym_is_scored_by_its_own_scorer(folder):
    pytest.importorskip("reasoning_gym")
    entry = {"question": "4 + 3 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    rules = rules_of("procedural", isolate=False)
    said = ["4 + 3 = <answer>7</answer>", "<answer>17</answer>", "It is 7"]
    assert rules(prompts=[""] * 3, completions=said, entry=[json.dumps(entry)] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_trls_own_functions_stand_beside_the_rules(folder):
    (punish,) = build_rewards(None, ["near_limit.punish"])
    assert punish(completion_ids=[range(896), range(960), range(1024)]) == [0.0, -0.5, -1.0]


@pytest.mark.slow
def test_a_rule_set_is_verls_compute_score(folder, capsys):
    (folder / "rules.yaml").write_text("rules: [{rule: answer}]\n")
    space = {"RuleSet": RuleSet}
    exec(PRINTED["my_reward.py"], space)
    calls = ((f"A: {number}", "18") for number in count(17))
    totals = [space["compute_score"]("sums", *next(calls), {"index": 0}) for _ in range(2)]
    assert totals == [0.0, 1.0] and space["compute_score"]("sums", "A: 18", "unreadable") == 0.0
    assert capsys.readouterr().out == "1.0\n"
