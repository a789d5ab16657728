"""Worker of test_gather_of_cards: what accelerate gathers from two processes, and what it refuses."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator


def gathered(accelerator: Accelerator, tensor: torch.Tensor) -> list | str:
    try:
        return accelerator.gather(tensor).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    facts = {
        "number": gathered(accelerator, torch.tensor(rank)),
        "columns": gathered(accelerator, (torch.arange(4).view(2, 2) + 4 * rank).T),
        "no rows": gathered(accelerator, torch.zeros(0, 3)),
        "no columns": gathered(accelerator, torch.zeros(2, 0)),
        "dtype": gathered(accelerator, torch.zeros(1, dtype=torch.int16)),
        "shapes": gathered(accelerator, torch.zeros(1 + rank)),
    }
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(facts))
    accelerator.wait_for_everyone()
    accelerator.end_training()
