"""The task of the quickstart: sums and differences of two one-digit numbers, from reasoning_gym's `chain_sum`.

There are only 200 of them, from 45 pairs of different operands (four expressions each: a+b, b+a, a-b, b-a) and ten
pairs of equal ones (two each). Sixteen whole pairs are held out, so no held-out problem shares its two operands with a
training problem, in either order and with either sign: what the model gets right there it has not memorised.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from trl_ext.errors import SupportError

NUM_TRAIN = 2000
NUM_HELD_OUT_PAIRS = 16  # 64 problems
SEED = 42
INSTRUCTION = "Answer with the equation only."


def build_data(folder: Path) -> None:
    """Write train.jsonl and test.jsonl."""
    held_out = held_out_pairs()
    train = islice((problem for problem in problems() if operands(problem) not in held_out), NUM_TRAIN)
    test = {p["metadata"]["expression"]: p for p in islice(problems(), NUM_TRAIN * 10) if operands(p) in held_out}
    _write(folder / "train.jsonl", map(row, train))
    _write(folder / "test.jsonl", (row(test[expression]) for expression in sorted(test)))
    print(f"quickstart: {NUM_TRAIN} sums to train on, {len(test)} held out", file=sys.stderr)


def held_out_pairs() -> frozenset[frozenset[int]]:
    """Pairs of different operands that only the held-out problems use."""
    pairs = [frozenset(pair) for pair in combinations(range(10), 2)]
    return frozenset(random.Random(SEED).sample(pairs, NUM_HELD_OUT_PAIRS))


def problems() -> Iterator[dict[str, Any]]:
    """reasoning_gym's problems, without end; the seed fixes their order."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise SupportError(
            "The quickstart's data needs reasoning-gym. Run: pip install 'trl_ext[quickstart]'"
        ) from error
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    yield from reasoning_gym.create_dataset("chain_sum", size=NUM_TRAIN * 10, seed=SEED, **one_digit)


def operands(problem: dict[str, Any]) -> frozenset[int]:
    left, _, right = problem["metadata"]["expression"].split()
    return frozenset({int(left), int(right)})


def row(problem: dict[str, Any]) -> dict[str, Any]:
    """One dataset row: a conversational prompt, and the gold answer as text."""
    # Measured on 64 random problems with this wording: right in 55 % of greedy answers and in 14 % of those sampled at
    # temperature 1, mostly where the equation is restated. With "number only", the likeliest bare number was right for
    # 1 of 80 problems, and the format rule pulled against the answer rule: 20 steps left greedy accuracy at 55 %.
    question = f"{problem['question']} ?\n{INSTRUCTION}"
    return {"prompt": [{"role": "user", "content": question}], "answer": problem["answer"]}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
