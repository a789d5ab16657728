r"""Does `Math` pay for work that was not done, and for right answers in other forms? Counts on published problems.

`--gsm8k` takes GSM8K's test.jsonl (github.com/openai/grade-school-math): the calculator annotations of each solution
(`<<16-3-4=9>>`, `<<9*2=18>>`) are put into one another, which gives the problem as one expression, `(16-3-4)*2`. In a
box it has the right value, and nothing was computed. Solutions that compute nothing give a plain number.
`--golds` takes JSON Lines files with golds: each must be paid in its own text, its harmless rewrites must be, its
harmful ones must not (`metamorphic.py`).

    python benchmarks/uncomputed.py --gsm8k gsm8k/test.jsonl --golds gsm8k/test.jsonl math500.jsonl \
        --output benchmarks/results/uncomputed.json
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from counts import show_counts
from metamorphic import rewrite_golds

from trl_ext.rewards import Math, Row, RuleSet

_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
_NUMBER = re.compile(r"\d*\.?\d+")
_PROMPTS, _GOLDS = ("question", "problem", "prompt"), ("answer", "final_answer", "solution")


def as_expression(solution: str) -> str | None:
    """Return a solution's last computation, each number that was computed before written as its computation."""
    known: dict[str, str] = {}
    expression = None
    for computed, result in _ANNOTATION.findall(solution):
        plain = computed.replace("$", "").replace(",", "").replace("%", "/100")
        expression = _NUMBER.sub(lambda number: f"({known[number[0]]})" if number[0] in known else number[0], plain)
        known[result.replace("$", "").replace(",", "").strip()] = expression
    return expression


def expressions(path: Path) -> dict[str, int]:
    """Count the problems that are paid as one expression, by form."""
    rows = read(path)
    asked = [(row, found) for row in rows if (found := as_expression(row["answer"])) is not None]
    plain = [found for _, found in asked if _NUMBER.fullmatch(found.strip())]
    counts = {"problems": len(asked), "of them plain numbers": len(plain)}
    for name, rule in (
        ("train", Math()),
        ("train, form any", Math(form="any")),
    ):
        boxes = [(row, f"\\boxed{{{found.replace('*', chr(92) + 'cdot ')}}}") for row, found in asked]
        paid = [rule.score(Row(row["prompt"], box, None, row)).value == 1.0 for row, box in boxes]
        counts[f"paid, {name}"] = sum(paid)
    return counts


def golds(path: Path) -> dict[str, int]:
    """Count golds that are paid in their own text, and their rewrites."""
    rows = read(path)
    rule = Math()
    own = [rule.score(Row(row["prompt"], rule.ideal(row) or "", None, row)) for row in rows]
    rules = RuleSet([rule], isolate=False)
    found = rewrite_golds(rules, rows)
    return {
        "golds": len(rows),
        "unreadable": sum(verdict.status == "gold_invalid" for verdict in own),
        "paid in their own text": sum(verdict.value == 1.0 for verdict in own),
        "harmless rewrites": found.num_harmless,
        "harmless rewrites paid": found.num_harmless_paid,
        "harmful rewrites": found.num_harmful,
        "harmful rewrites paid": found.num_harmful_paid,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file as prompt and answer, whatever it calls them; several answers as a list."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [next(key for key in names if key in rows[0]) for names in (_PROMPTS, _GOLDS)]
    return [{"prompt": row[keys[0]], "answer": row[keys[1]]} for row in rows]


def main() -> None:
    """Count what the given files allow, print it, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test.jsonl")
    parser.add_argument("--golds", type=Path, nargs="*", default=[], help="JSON Lines files with golds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {"GSM8K as expressions": expressions(options.gsm8k)} if options.gsm8k else {}
    found |= {f"golds of {path.parent.name}/{path.name}": golds(path) for path in options.golds}
    show_counts("uncomputed", found, options.output)


if __name__ == "__main__":
    main()
