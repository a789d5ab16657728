"""Tensors that go from process to process: ragged rows, and what accelerate gathers."""

import torch
from accelerate import Accelerator
from torch.nn.functional import pad

from trl_ext.trainers.step import exchange
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


def change_ranks(folder) -> dict:
    """By plan, what this rank got."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    mine = padded(list(range(rank * ROWS, (rank + 1) * ROWS)))
    return {name: redistribute(mine, wanted, accelerator) for name, wanted in plans(accelerator.num_processes).items()}


def change_ranks_by_rows(folder) -> dict:
    """By plan, what this rank got, where no key's rows are gathered together."""
    exchange.GATHERED_BYTES = 1
    return change_ranks(folder)


def gather(folder) -> dict:
    """What accelerate gathers from two processes, and what it refuses."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    tensors = {
        "number": torch.tensor(rank),
        "columns": (torch.arange(4).view(2, 2) + 4 * rank).T,
        "no rows": torch.zeros(0, 3),
        "no columns": torch.zeros(2, 0),
        "dtype": torch.zeros(1, dtype=torch.int16),
        "shapes": torch.zeros(1 + rank),
    }
    found = {}
    for name, tensor in tensors.items():
        try:
            found[name] = accelerator.gather(tensor).tolist()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
