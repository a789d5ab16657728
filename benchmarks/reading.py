r"""Do `Answer` and `Math` find the answers of real models? Agreement with the labels that were published with them.

`--gsm8k` takes example_model_solutions.jsonl of github.com/openai/grade-school-math: 5,276 labelled solutions that end
with a line "A: 18". Each is judged as it is, and with that line written in six other styles. `--qwen` takes
evaluation/data/eval_rm_maj_example/math_cot_100.jsonl of github.com/QwenLM/Qwen2.5-Math: 800 labelled solutions of
problems of MATH, in boxes, judged by `Math`.

    python benchmarks/reading.py --gsm8k example_model_solutions.jsonl --qwen math_cot_100.jsonl \
        --output benchmarks/results/reading.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from counts import show_counts

from trl_ext.rewards import Answer, Math, Row

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
STYLES = {
    "as published": "A: {}",
    "answer is": "The answer is {}.",
    "bold": "**Final Answer:** {}",
    "goes on": "So the final answer is {}, as asked.",
    "below": "The answer is:\n\n**{}**",
    "formula": "The answer is ${}$.",
    "sentence": "Final Answer: The total is {}.",
}


def gsm8k(path: Path, style: str) -> Iterator[tuple[str, str, bool]]:
    """Yield text, gold and label of each solution that ends with an answer, in a style of `STYLES`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        for model in MODELS:
            work, announced, answer = problem[model]["solution"].rpartition("\nA:")
            if announced:
                text = f"{work}\n{STYLES[style].format(answer.strip())}"
                yield text, problem["ground_truth"], problem[model]["is_correct"]


def qwen(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield text, gold and label of each sampled solution."""
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        for text, label in zip(problem["code"], problem["score"], strict=True):
            yield text, problem["gt"], bool(label)


def counts(rows: list[tuple[str, str, bool]], rules: list[Answer | Math]) -> dict[str, int]:
    """Return the number of rows, and for each rule how many it judges as labelled."""
    found = {"rows": len(rows)}
    for rule in rules:
        values = [rule.score(Row(None, text, None, {"answer": gold})).value for text, gold, _ in rows]
        agree = [(value == 1.0) == label for value, (_, _, label) in zip(values, rows, strict=True)]
        found[f"{rule.name}_as_labelled"] = sum(agree)
    return found


def main() -> None:
    """Count what the given files allow, print it, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="example_model_solutions.jsonl")
    parser.add_argument("--qwen", type=Path, help="math_cot_100.jsonl")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    if options.gsm8k:
        both: list[Answer | Math] = [Answer(), Math()]
        found |= {f"GSM8K, {style}": counts([*gsm8k(options.gsm8k, style)], both) for style in STYLES}
    if options.qwen:
        found["MATH, Qwen2.5-Math"] = counts([*qwen(options.qwen)], [Math()])
    show_counts("reading", found, options.output)


if __name__ == "__main__":
    main()
