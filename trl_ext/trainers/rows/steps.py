"""Too few rows for one step: the run would save the model as it was, and end as a success."""

from typing import Any

from datasets import Dataset

from trl_ext.errors import DataError


def check_steps(dataset: Any, args: Any) -> None:
    """Raise DataError for fewer rows than one batch takes, where an incomplete batch is dropped.

    Args:
        dataset: The training rows as the dataloader will get them.
        args: The trainer's config; one with `num_generations` answers prompts.
    """
    if not isinstance(dataset, Dataset):
        return
    num_rows, processes = len(dataset), f"{args.world_size} process{'es' if args.world_size > 1 else ''}"
    if hasattr(args, "num_generations"):
        num_needed = args.generation_batch_size // args.num_generations
        needs = f"one generation takes {num_needed} prompts, of {args.num_generations} completions each"
        advice = "per_device_train_batch_size, steps_per_generation (or gradient_accumulation_steps)"
    else:
        num_needed = args.train_batch_size * args.world_size if args.dataloader_drop_last else 1
        needs = f"one batch takes {num_needed} pairs, and dataloader_drop_last drops what is less"
        advice = "per_device_train_batch_size, or set dataloader_drop_last to False"
    if num_rows < num_needed:
        raise DataError(
            f"train_dataset has {num_rows} rows; over {processes} {needs}. No step would be taken. Give more rows, "
            f"or lower {advice}."
        )
