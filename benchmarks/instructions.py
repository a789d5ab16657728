"""Instructions against the verdicts that IFBench publishes for a model's sample outputs.

    python benchmarks/instructions.py path/to/IFBench --save benchmarks/results/instructions.json

Reads `data/IFBench_test.jsonl` and `eval/eval_results_strict.jsonl` of a checkout of github.com/allenai/IFBench.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from trl_ext.rewards import Row
from trl_ext.rewards.rules.instructions import KNOWN, Instructions


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def follows(text: str, name: str, arguments: dict[str, Any]) -> bool | None:
    """True or False as the rule judges a text; None where it cannot read the row."""
    cell = {"instruction_id_list": [name], "kwargs": [arguments]}
    value = Instructions().score(Row(None, text, None, {"instructions": cell})).value
    return None if value is None else value == 1.0


def compare(folder: Path) -> dict[str, Any]:
    """Count ids that are known, instructions that are read, and verdicts that agree, with the others by id."""
    rows = {row["prompt"]: row for row in read(folder / "data" / "IFBench_test.jsonl")}
    ids = {name for row in rows.values() for name in row["instruction_id_list"]}
    asked = [pair for row in rows.values() for pair in zip(row["instruction_id_list"], row["kwargs"], strict=True)]
    pairs = Counter[tuple[str, bool, bool | None]]()
    for output in read(folder / "eval" / "eval_results_strict.jsonl"):
        row = rows.get(output["prompt"])
        if row is None:  # A few prompts were mended since.
            continue
        wanted = zip(row["instruction_id_list"], row["kwargs"], output["follow_instruction_list"], strict=True)
        for name, arguments, published in wanted:
            if name not in KNOWN:  # The tasks with one known answer (`custom:`) are left out.
                continue
            pairs[name, published, follows(output["response"], name, arguments)] += 1
    return {
        "ids": len(ids),
        "ids_known": len(ids & set(KNOWN)),
        "instructions": len(asked),
        "instructions_read": sum(follows("So it is.", *pair) is not None for pair in asked),
        "verdicts": pairs.total(),
        "agree": sum(count for (_, published, ours), count in pairs.items() if published == ours),
        "published_true_ours_false": dict(by_id(pairs, published=True)),
        "published_false_ours_true": dict(by_id(pairs, published=False)),
    }


def by_id(pairs: Counter[tuple[str, bool, bool | None]], published: bool) -> Counter[str]:
    found = Counter[str]()
    for (name, theirs, ours), count in pairs.items():
        if theirs == published != ours:
            found[name] += count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of IFBench")
    parser.add_argument("--save", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    figures = json.dumps(compare(options.folder), indent=2)
    print(figures)
    if options.save:
        options.save.write_text(figures + "\n", "utf-8")


if __name__ == "__main__":
    main()
