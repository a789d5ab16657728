r"""The frozen verdicts of the rules `answer` and `math`: `tests/light/rewards/verdicts.jsonl`, one text a line.

A line has `why`, the `rules` that judge it (a name and the fields that differ from the defaults), a `prompt` if it
matters, the `text`, and its golds by verdict: `paid` (1.0), `unpaid` (0.0), a fraction such as `0.67`, or a status
other than "ok" (`conflict`, `no_answer`, `undecided`, ...).

Texts of data sets are referenced, not copied: the text `{"set", "row", "form"}` is the final answer of a row in one of
the forms of the audit, `{"set", "row", "column"}` is a column of the row. A gold that is a number is the gold of that
row. Sets are read from the folder that TRL_EXT_DATA names.

    python -m tests.verdicts  # judge all lines again and write the file: a verdict that changes shows in the diff

A new line needs no verdicts: it may have its golds under any key, such as `golds`.
"""

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from trl_ext.rewards import Answer, Math, Row, Rule, Verdict
from trl_ext.rewards.auditing.audit import FORMS

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests/light/rewards/verdicts.jsonl"
KEYS = ("why", "rules", "prompt", "text")  # of a line; all other keys are verdicts
PROMPTS = ("question", "problem", "prompt")  # columns with prompts, by data set

Line = dict[str, Any]


def read_lines() -> list[Line]:
    """Return the lines of the file."""
    with FILE.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def data_folder() -> Path:
    """Return the folder of the data sets."""
    return Path(os.environ.get("TRL_EXT_DATA", ROOT.parent / "shared" / "data"))


@lru_cache(maxsize=8)
def rows_of(name: str) -> tuple[dict[str, Any], ...]:
    """Return the rows of a data set."""
    with (data_folder() / name).open(encoding="utf-8") as file:
        return tuple(map(json.loads, file))


def is_here(line: Line) -> bool:
    """Return True if a line's text is in the file, or its data set on this machine."""
    return isinstance(line["text"], str) or (data_folder() / line["text"]["set"]).exists()


@lru_cache(maxsize=64)
def rule_of(words: str) -> Rule:
    """Return the rule that a line names, such as "answer kind=choice"."""
    name, *fields = words.split()
    return {"answer": Answer, "math": Math}[name](**dict(field.split("=") for field in fields))


def verdict_name(verdict: Verdict) -> str:
    """Return the key of a verdict in a line."""
    if verdict.status != "ok":
        return verdict.status
    return {1.0: "paid", 0.0: "unpaid"}.get(verdict.value, f"{verdict.value:.2g}")


def rows_to_judge(line: Line) -> Iterator[tuple[Any, Row]]:
    """Return each gold of a line as it is written there, and the row that a rule judges."""
    text, prompt, cells = line["text"], line.get("prompt"), {}
    if not isinstance(text, str):
        rows = rows_of(text["set"])
        row = rows[text["row"]]
        prompt = next(row[column] for column in PROMPTS if column in row)
        answer = row["answer"].rpartition("#### ")[2]
        cells = {number: each["answer"] for number, each in enumerate(rows)}
        text = row[text["column"]] if "column" in text else FORMS[text["form"]].format(answer)
    for key, golds in line.items():
        for gold in () if key in KEYS else golds:
            cell = cells[gold] if cells and isinstance(gold, int) else gold
            yield gold, Row(prompt, text, None, {"answer": cell})


def judged(line: Line) -> list[Line]:
    """Return the line with the verdicts of its rules: several lines if these differ."""
    rows = list(rows_to_judge(line))
    found: list[Line] = []
    for words in line["rules"]:
        verdicts: dict[str, list[Any]] = {}
        for gold, row in rows:
            verdicts.setdefault(verdict_name(rule_of(words).score(row)), []).append(gold)
        same = next((each for each in found if verdicts == {key: each[key] for key in each if key not in KEYS}), None)
        if same is not None:
            same["rules"].append(words)
        else:
            found.append({key: line[key] for key in KEYS if key in line} | {"rules": [words]} | verdicts)
    return found


def main() -> None:
    """Judge all lines and write the file; lines whose data set is not here stay as they are."""
    lines = read_lines()
    new = [each for line in lines for each in (judged(line) if is_here(line) else [line])]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
    num_changed = sum(line not in lines for line in new)
    FILE.write_text(text, encoding="utf-8")
    num_left = sum(not is_here(line) for line in lines)
    print(f"{len(new)} lines, {num_changed} new or changed, {num_left} of data sets that are not here")


if __name__ == "__main__":
    main()
