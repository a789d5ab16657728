r"""Does audit show every gold that only its own text meets? Golds of real data sets, by the rule Math.

A gold that audit does not show must be met by at least one other text in each of its parts, or be in words. It must
also be decided for answers that have nothing to do with it: twenty of all forms, none of them drawn from the data.

    python benchmarks/golds.py college_math/test.jsonl HardVerify-Math.json:ground_truth \
        --output benchmarks/results/golds.json

A file is JSON or JSON lines; behind the colon stands the column of the golds, without one `answer`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from machine import save

from trl_ext.rewards import Math, Row, RuleSet
from trl_ext.rewards.auditing.audit import audit
from trl_ext.rewards.auditing.rewrites import bare, is_words, restated

FOREIGN = [
    *r"1 -7 0.125 \frac{2}{9} \pi \sqrt{5} x 2x+1 x=1 x<1 1<x<2 (1,2) [1,2) \{1,2\} 1,2 3:4 12_5 50\% i".split(),
    *(r"(1,2)\cup(3,4)", r"\text{yes}", r"5 \text{ cm}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
]


def golds_in(name: str) -> list[Any]:
    """Read the golds of `file` or `file:column`."""
    path, _, column = name.partition(":")
    text = Path(path).read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    return [row[column or "answer"] for row in rows]


def counts(golds: list[Any], rules: RuleSet) -> dict[str, int]:
    """Audit the golds, and count those that it does not show though it should."""
    (found,) = audit(rules, [{"answer": gold} for gold in golds]).rules
    shown, rule = set(found.lost_rows), Math()
    undecided, untried = 0, 0
    for row, gold in enumerate(golds):
        if row in shown:
            continue
        columns = {"answer": gold}
        verdicts = [rule.score(Row(None, f"\\boxed{{{text}}}", None, columns)) for text in FOREIGN]
        undecided += any(verdict.status == "undecided" for verdict in verdicts)
        answer = bare(rule.ideal(columns) or "")
        untried += not is_words(answer) and not restated(answer)
    return {
        "golds": len(golds),
        "unreadable": found.num_unreadable,
        "own_text": found.num_own_text,
        "words": found.num_words,
        "not_shown_but_undecided": undecided,
        "not_shown_but_untried": untried,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE[:COLUMN]")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    arguments = parser.parse_args()
    rules = RuleSet([Math()])
    found = {}
    for name in arguments.files:
        path = Path(name.partition(":")[0])
        found[f"{path.parent.name}/{path.name}"] = counts(golds_in(name), rules)
        print(f"{path.parent.name}/{path.name}", found[f"{path.parent.name}/{path.name}"], flush=True)
    rules.close()
    save(arguments.output, "golds", files=found)


if __name__ == "__main__":
    main()
