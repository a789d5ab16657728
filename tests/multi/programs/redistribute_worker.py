"""Worker of test_redistribute: ragged rows change ranks; each rank writes what it got."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.functional import pad

from trl_ext.trainers.step.exchange import redistribute

ROWS = 3  # of a rank
# Tokens of each row's prompt and completion; the longest of both lie on other ranks.
PROMPTS, COMPLETIONS = (2, 1, 4, 7, 3, 3, 1, 5, 2), (5, 1, 3, 2, 2, 1, 4, 9, 6)


def row(number: int) -> dict:
    """What one row holds, without padding."""
    prompt = torch.arange(PROMPTS[number]) + 100 * number + 1
    completion = torch.arange(COMPLETIONS[number]) - 100 * number - 1
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "tool_mask": completion % 2 == 0,
        "old_per_token_logps": completion.to(torch.bfloat16),
        "advantages": torch.tensor(float(number)),
        "per_sequence": torch.tensor([number / 2]),
        "notes": {"number": number, "image": torch.full((number, 2), number)},
        "empty": None,
        "num_items_in_batch": torch.tensor(7),
    }


def padded(numbers: list[int]) -> dict:
    """Rows as TRL pads them: to their longest prompt, on the left, and to their longest completion, on the right."""
    rows = [row(number) for number in numbers]
    batch = {}
    for key, first in row(0).items():
        values = [one[key] for one in rows]
        if key in ("empty", "num_items_in_batch"):
            batch[key] = first
        elif key == "notes":
            batch[key] = values
        elif key in ("advantages", "per_sequence"):
            batch[key] = torch.stack(values)
        else:
            widest = max(map(len, values))
            gaps = [widest - len(value) for value in values]
            sides = [(gap, 0) if key.startswith("prompt_") else (0, gap) for gap in gaps]
            batch[key] = torch.stack([pad(value, side) for value, side in zip(values, sides, strict=True)])
    return batch


def plans(num_ranks: int) -> dict[str, list[list[int]]]:
    """By name: which rows each rank is to have."""
    numbers = list(range(num_ranks * ROWS))
    return {
        "as they are": [numbers[start : start + ROWS] for start in numbers[::ROWS]],
        "reversed": [numbers[::-1][start : start + ROWS] for start in numbers[::ROWS]],
        "all on the last": [[]] * (num_ranks - 1) + [numbers[::2] + numbers[1::2]],
        "one row twice, the others not": [[1]] * num_ranks,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    mine = padded(list(range(rank * ROWS, (rank + 1) * ROWS)))
    got = {name: redistribute(mine, wanted, accelerator) for name, wanted in plans(accelerator.num_processes).items()}
    everywhere = gather_object([got])
    if accelerator.is_main_process:
        torch.save(everywhere, Path(sys.argv[1]))
    accelerator.wait_for_everyone()
    accelerator.end_training()
