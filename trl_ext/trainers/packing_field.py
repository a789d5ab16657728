"""The setting `packing`, which our configs share: unset, True and False, and what follows from each."""

from typing import Any

from trl_ext.errors import ConfigError

PACKING = {
    "help": "Forward flat rows of real tokens instead of padded batches. Unset: yes, and fall back to TRL's padded "
    "path with a warning where the model is not exact when packed. True: yes, or stop before the first step. "
    "False: no."
}


def settle_packing(config: Any, is_required: bool) -> None:
    """Make `packing` True or False, and note whether falling back is allowed.

    Raises:
        ConfigError: a token budget without packing.
    """
    if config.max_tokens_per_forward is not None and config.packing is False:
        raise ConfigError(
            f"max_tokens_per_forward={config.max_tokens_per_forward} has no effect with packing=False. "
            "Remove one of the two."
        )
    config.packing_is_required = is_required
    config.packing = config.packing is not False
