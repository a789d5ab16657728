"""What to set when memory is short: the next cheaper setting, in a sentence that begins in the middle of one."""

from typing import Any

from trl_ext.memory.units import gib


def remedy(args: Any, plan: Any = None) -> str:
    """The setting that saves memory, costs least and leaves the optimisation as it is.

    Args:
        args: The trainer's arguments.
        plan: A `Plan`, which says what the setting needs; None without one.
    """
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0), None)
    if smaller is not None:
        return (
            f"set per_device_train_batch_size={smaller} and gradient_accumulation_steps={steps * size // smaller}"
            f"{_needs(plan, per_device_train_batch_size=smaller)}; the optimisation stays the same."
        )
    if not args.gradient_checkpointing:
        return f"set gradient_checkpointing=True{_needs(plan, checkpoint_every=1)}; it costs a second forward."
    return "shorten the sequences, or take the next ZeRO stage (accelerate_configs/)."


def _needs(plan: Any, **changes: Any) -> str:
    return "" if plan is None else f" ({gib(plan.what_if(**changes).need_bytes):.1f} GiB by the plan)"
