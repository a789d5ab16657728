"""What benchmarks of reward models train on: pairs of random words at the lengths of hh-rlhf."""

import random
from typing import Any

from benchmarks.grpo_task import FIRST_WORD, Shape, lengths

# Of hh-rlhf's harmless pairs (1,800 of them, SmolLM2's tokenizer): what both sides begin with has 124 tokens in the
# mean, at most 835, and what is a side's own 45, at most 556; the logarithms of both spread by 0.97.
SIDES = Shape("hh-rlhf", 124, 45, 556, 0.97, groups=64, generations=2)
LONGEST_PROMPT = 835


def prompt_lengths(sides: Shape) -> list[int]:
    """Tokens that both sides of each pair begin with, the same in every call."""
    alone = Shape("prompts", 0, sides.prompt, LONGEST_PROMPT, sides.sigma, groups=sides.groups, generations=1)
    return lengths(alone, 0)


def pairs(sides: Shape, vocab: int) -> Any:
    """A dataset of the pairs of one optimizer step; the last token of a side is the end, which trainers add."""
    draw = random.Random(0)

    def words(number: int) -> str:
        return " ".join(f"w{draw.randrange(FIRST_WORD, vocab)}" for _ in range(number))

    own = iter(lengths(sides, 1))
    rows = []
    for number in prompt_lengths(sides):
        prompt = words(number)
        rows.append(
            {"prompt": prompt, **{side: f" {words(max(next(own) - 1, 1))}" for side in ("chosen", "rejected")}}
        )
    from datasets import Dataset  # here: the preflight reads the shape, and names libraries that are missing

    return Dataset.from_list(rows)
