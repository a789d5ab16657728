"""Answer: what is read from a completion and from a gold column, and what is compared."""

import json
from pathlib import Path

import pytest

from trl_ext.rewards import Answer, Row, RuleSet


def status_of(text: str, gold: object, **fields: str) -> str:
    return Answer(**fields).score(Row(None, text, None, {"answer": gold})).status


@pytest.mark.parametrize("kind", ["number", "choice", "exact"])
def test_a_thousand_boxes_in_boxes_are_a_conflict(kind):
    text = "\\boxed{" * 5000 + "B" + "}" * 5000
    assert status_of(text, "4" if kind == "number" else "B", kind=kind) == "conflict"


def test_the_detail_says_what_was_read_and_where():
    verdict = Answer().score(Row(None, "A: 17", None, {"answer": "#### 18"}))
    assert verdict.detail == "'A:': 17; gold '####': 18"


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        pytest.skip(f"there is no {path}: set TRL_EXT_DATA to the folder that holds {path.name}")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_gold_is_right_when_compared_with_itself(data_dir):
    golds = [row["answer"] for row in read_rows(data_dir / "gsm8k_train.jsonl")]
    assert set(RuleSet([Answer()])(completions=golds, answer=golds)) == {1.0}


@pytest.mark.parametrize(("side", "value"), [("chosen", 1.0), ("rejected", 0.0)])
def test_labelled_solutions_get_their_label(data_dir, side, value):
    rows = read_rows(data_dir / "gsm8k_pairs_500q.jsonl")
    completions = [row[side] for row in rows]
    assert set(RuleSet([Answer()])(completions=completions, answer=[row["answer"] for row in rows])) == {value}
