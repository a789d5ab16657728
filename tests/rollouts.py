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
