"""vLLM servers of a run: how often each has been started, counted by the launcher and read by the trainer."""

import os
from pathlib import Path

STARTS_VARIABLE = "TRL_EXT_VLLM_STARTS"  # names the launcher's file


def starts() -> str:
    """How often each server of this run has been started, as the launcher writes it; "" for servers of others."""
    path = os.environ.get(STARTS_VARIABLE)
    return Path(path).read_text(encoding="utf-8") if path else ""
