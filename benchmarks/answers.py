r"""How well does `Math` tell right answers from wrong ones? Counts on the labelled answers of other projects.

Each file is what its project publishes; none is shipped here. `--math_verify` takes a checkout of
github.com/huggingface/Math-Verify, whose parametrized tests are read (and so imported): a gold, a completion, and
whether it is right; `tests/test_yujianll.py` is left out, since the counts to compare with were taken without it.
`--hard_verify` takes HardVerify-Math.json of github.com/uw-nsl/TinyV: 250 golds, each with a right answer that graders
refuse and a wrong one. `--golds` takes JSON Lines with a column of golds, such as college_math's test.jsonl of
github.com/QwenLM/Qwen2.5-Math: how many can be met by nothing but their own text, what `Math` says of them, and how
many of those that it reads are paid as their own text in each of the forms in which models announce answers.

    python benchmarks/answers.py --math_verify Math-Verify --hard_verify HardVerify-Math.json \
        --golds college_math/test.jsonl --output benchmarks/results/answers.json
"""

import argparse
import importlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from machine import write
from rich.console import Console
from rich.table import Table

from trl_ext.rewards import Math, Row, RuleSet
from trl_ext.rewards.auditing.audit import audit

MODULES = ("all", "boxed", "numina_cases", "open_thoughts", "strict")


@dataclass(frozen=True)
class Case:
    """One labelled answer: its name in its project, the gold, the completion, and whether that is right."""

    name: str
    gold: str
    completion: str
    is_right: bool


def math_verify_cases(checkout: Path) -> list[Case]:
    """Return the cases of Math-Verify's parametrized tests that have a gold and a prediction."""
    sys.path.insert(0, str(checkout))
    cases = []
    for module in MODULES:
        for name, test in vars(importlib.import_module(f"tests.test_{module}")).items():
            marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
            for mark in marks:
                names = [one.strip() for one in mark.args[0].split(",")]
                if "gold" not in names:
                    continue
                for number, values in enumerate(mark.args[1]):
                    case = dict(zip(names, values, strict=True))
                    cases.append(Case(f"{name}[{number}]", case["gold"], case["pred"], bool(case["expected"])))
    return cases


def hard_verify_cases(path: Path) -> list[Case]:
    """Return HardVerify-Math's right and wrong answers, in boxes as its own evaluation puts them."""
    cases = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        for key, is_right in (("fn_output", True), ("tn_output", False)):
            completion = f"\\boxed{{{row[key].strip()}}}"
            cases.append(Case(f"{row['id']}", row["ground_truth"], completion, is_right))
    return cases


def counts(cases: list[Case]) -> dict[str, object]:
    """Return how many cases are judged as labelled, and what became of the others."""
    rule = Math()
    paid = {case: rule.score(Row(None, case.completion, None, {"answer": case.gold})) for case in cases}
    right = [case for case in cases if case.is_right]
    wrong = [case for case in cases if not case.is_right]
    missed = [case for case in right if paid[case].value != 1.0]
    false = [case for case in wrong if paid[case].value == 1.0]
    return {
        "cases": len(cases),
        "as_labelled": len(cases) - len(missed) - len(false),
        "right": len(right),
        "right_and_paid": len(right) - len(missed),
        "wrong_and_paid": len(false),
        "status_of_missed": dict(Counter(paid[case].status for case in missed)),
        "missed": [case.name for case in missed],
        "paid_though_wrong": [case.name for case in false],
    }


def gold_counts(path: Path, column: str) -> dict[str, object]:
    """Return what `Math` says of golds whose answer is another text, and how many are paid as their own text."""
    golds = [json.loads(line)[column] for line in path.read_text(encoding="utf-8").splitlines()]
    rule = Math()
    other = [rule.score(Row(None, "\\boxed{12345.678}", None, {"answer": gold})).status for gold in golds]
    own = [rule.score(Row(None, rule.ideal({"answer": gold}) or "", None, {"answer": gold})).value for gold in golds]
    (found,) = audit(RuleSet([rule], isolate=False), [{"answer": gold} for gold in golds], others=0).rules
    forms = {f"as {form}": f"{paid} paid, {unpaid} not" for form, (paid, unpaid) in found.forms.items()}
    return {"golds": len(golds), "own_text_paid": sum(value == 1.0 for value in own), **Counter(other), **forms}


def main() -> None:
    """Count what the given files allow, print it, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--math_verify", type=Path, help="checkout of Math-Verify")
    parser.add_argument("--hard_verify", type=Path, help="HardVerify-Math.json")
    parser.add_argument("--golds", type=Path, nargs="*", default=[], help="JSON Lines files with golds")
    parser.add_argument("--column", default="answer", help="column of --golds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name, path, read in (
        ("Math-Verify", options.math_verify, math_verify_cases),
        ("HardVerify-Math", options.hard_verify, hard_verify_cases),
    ):
        cases = read(path) if path else []
        found |= {name: counts(cases)} if cases else {}
    for path in options.golds:
        found[f"golds of {path.parent.name or path.stem}"] = gold_counts(path, options.column)
    table = Table("measured", "counts")
    for name, figures in found.items():
        shown = {key: value for key, value in figures.items() if not isinstance(value, list)}
        table.add_row(name, ", ".join(f"{key} {value}" for key, value in shown.items()))
    Console().print(table)
    if options.output:
        write(options.output, {"benchmark": "answers", **found})


if __name__ == "__main__":
    main()
