"""Warnings that are said once a process: a rule is asked thousands of times."""

import logging
from collections.abc import Hashable

logger = logging.getLogger("trl_ext.rewards")
_said: set[Hashable] = set()


def warn_once(key: Hashable, message: str) -> None:
    """Log the message unless one with this key was logged before."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
