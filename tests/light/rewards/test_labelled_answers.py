"""Completions with the golds that they are paid for, and those that they are not: `answers.jsonl`, one text a line.

A line has `why`, the `rules` that judge it (a name and fields that differ from the defaults), the `text`, a `prompt`
where it matters, and for each verdict the golds that get it: `paid`, `unpaid` (with a status where it matters), or the
status of a row without a value.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from trl_ext.rewards import Answer, Math, Row, Rule, Verdict

LINES: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
with Path(__file__).with_name("answers.jsonl").open(encoding="utf-8") as file:
    for line in map(json.loads, file):
        LINES[line["why"].partition(":")[0]].append(line)
VERDICTS = ("paid", "unpaid", "gold_invalid", "undecided")


def rule_of(words: str) -> Rule:
    name, *fields = words.split()
    return {"answer": Answer, "math": Math}[name](**dict(field.split("=") for field in fields))


def name_of(verdict: Verdict, expected: str) -> str:
    if verdict.value is None:
        return verdict.status
    name = {1.0: "paid", 0.0: "unpaid"}[verdict.value]
    return f"{name}: {verdict.status}" if ":" in expected else name


@pytest.mark.parametrize("why", LINES)
def test_each_text_gets_its_verdict_for_each_gold(why):
    wrong = []
    for line in LINES[why]:
        expected = {name: golds for name, golds in line.items() if name.partition(":")[0] in VERDICTS}
        assert expected, line
        for words in line["rules"]:
            for name, golds in expected.items():
                for gold in golds:
                    verdict = rule_of(words).score(Row(line.get("prompt"), line["text"], None, {"answer": gold}))
                    if name_of(verdict, name) != name:
                        wrong.append((words, line["text"], gold, name, verdict))
    assert wrong == []
