"""Fixed completions in the place of sampled ones, for tests that compare two trainers."""

import random

from tests import tiny


def rollout(prompts, trainer):
    """Fixed ragged completions: a function of the prompt and of its place among equal prompts."""
    tokenizer = trainer.processing_class
    seen: dict[str, int] = {}
    completion_ids = []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        draw = random.Random(f"{prompt}/{seen[prompt]}")
        ids = [draw.randrange(3, tiny.VOCAB) for _ in range(draw.choice([1, 3, 4, 9, 12]))]
        completion_ids.append([*ids[:-1], tokenizer.eos_token_id] if len(ids) in (3, 9) else ids)
    return {
        "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts],
        "completion_ids": completion_ids,
        "logprobs": None,
    }


def forked_rollout(prompts, trainer):
    """Fixed conversations of two turns: of eight with one prompt six fork, in the first turn or after it.

    One is the beginning of others, one is equal to another, and the prompt of a fifth holds half of its first turn.
    """
    tokenizer = trainer.processing_class
    seen: dict[str, int] = {}
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        number = seen[prompt] = seen.get(prompt, -1) + 1
        first, turns = _drawn(f"{prompt}/first", 20), [_drawn(f"{prompt}/{i}", 17) for i in range(3)]
        ids = {
            0: first + turns[0],
            1: first + turns[0] + _drawn(f"{prompt}/own", 4),
            2: first + turns[0][:-1] + [3, 4],
            3: first + turns[1],
            4: first + turns[2],
            5: first,
            6: first + turns[0],
            7: [*first[:-1], 5, 6, 7],
        }[number % 8]
        cut = 10 if number % 8 == 4 else 0
        prompt_ids.append(tokenizer(prompt)["input_ids"] + ids[:cut])
        completion_ids.append(ids[cut:])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def _drawn(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(8, tiny.VOCAB) for _ in range(count)]
