"""The setting of how a run ends, which our configs share."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EndingFields:
    """A field beside those of TRL's config."""

    save_on_signal: bool | None = field(
        default=None,
        metadata={
            "help": "On SIGTERM or one Ctrl-C, save a checkpoint at the end of the optimizer step, on all processes "
            "together, and end with exit code 75; a second Ctrl-C ends at once. Unset: on, except with "
            "save_strategy='no'."
        },
    )


def saves_on_signal(args: Any) -> bool:
    """Return True where a run saves before a signal ends it; `args` may be a plain config of TRL's."""
    wish = getattr(args, "save_on_signal", None)
    if wish is None:
        return args.enable_jit_checkpoint or args.save_strategy != "no"
    return bool(wish)
