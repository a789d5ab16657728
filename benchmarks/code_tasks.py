"""Hold the rule `Code` to HumanEval: right programs in the forms in which models write them, and cheats.

    python benchmarks/code_tasks.py /path/to/human-eval/data/HumanEval.jsonl.gz

Every canonical solution must pass in every form, no cheat may pass anywhere. Writes `results/code_tasks_cpu.json`.
"""

import argparse
import gzip
import json
import textwrap
from pathlib import Path
from typing import Any

from machine import save

from trl_ext.rewards import Code, Row

FENCE = "```"
FORMS = {
    "plain": "{fence}python\n{code}\n{fence}",
    "in a list": "1. Here it is:\n\n{indented}",
    "an example behind it": "{fence}python\n{code}\n{fence}\nUse:\n{fence}python\nprint({name}(1))\n{fence}",
    "without a language": "{fence}\n{code}\n{fence}",
    "with exit()": "{fence}python\n{code}\n\nexit()\n{fence}",
}
CHEATS = {
    "gives None": "def {name}(*a, **k): return None",
    "replaces the tests' helpers": (
        "def poly(*a): return 0\ndef encode_cyclic(s): return s\ndef encode_shift(s): return s\n"
        "def {name}(*a, **k): return a[0] if isinstance(a[0], str) else 0.0"
    ),
    "equals everything": (
        "class E(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
        "    def __lt__(s, o): return True\n    def __sub__(s, o): return s\n    def __abs__(s): return s\n"
        "    __hash__ = int.__hash__\ndef {name}(*a, **k): return E()"
    ),
    "exits hard": "import os\ndef {name}(*a, **k): os._exit(0)",
    "exits": "def {name}(*a, **k): raise SystemExit(0)",
}


def passed(rule: Code, tasks: list[dict[str, Any]], texts: list[str]) -> int:
    """Return how many of the texts, one a task, earn 1.0."""
    columns = [{"test": task["test"], "name": task["entry_point"], "head": task["prompt"]} for task in tasks]
    rows = [Row(None, text, None, cells) for text, cells in zip(texts, columns, strict=True)]
    return sum(verdict.value == 1.0 for verdict in rule.score_batch(rows))


def main() -> None:
    """Count, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("human_eval", type=Path)
    with gzip.open(parser.parse_args().human_eval, "rt") as file:
        tasks = [json.loads(line) for line in file]
    rule = Code(mode="asserts", tests="test", entry_point="name", setup="head")
    found: dict[str, Any] = {"tasks": len(tasks), "right_programs_paid": {}, "cheats_paid": {}}
    for form, template in FORMS.items():
        texts = []
        for task in tasks:
            code = task["prompt"] + task["canonical_solution"]
            indented = textwrap.indent(f"{FENCE}python\n{code}\n{FENCE}", "   ")
            texts.append(template.format(fence=FENCE, code=code, indented=indented, name=task["entry_point"]))
        found["right_programs_paid"][form] = passed(rule, tasks, texts)
    for cheat, code in CHEATS.items():
        texts = [f"{FENCE}python\n{code.replace('{name}', task['entry_point'])}\n{FENCE}" for task in tasks]
        found["cheats_paid"][cheat] = passed(rule, tasks, texts)
    print(json.dumps(found, indent=2))
    save(Path(__file__).parent / "results" / "code_tasks_cpu.json", "code_tasks", **found)


if __name__ == "__main__":
    main()
