"""vLLM servers of a run: options of their command, and how often the launcher has started each."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError

# Options that the launcher or another setting decides, or that TRL needs.
_DECIDED = (
    "model host port seed revision trust-remote-code tensor-parallel-size data-parallel-size gpu-memory-utilization "
    "max-model-len model-impl vllm-model-impl weight-transfer-config logprobs-mode max-logprobs".split()
)
STARTS_VARIABLE = "TRL_EXT_VLLM_STARTS"  # path of the launcher's file with the number of starts


def server_words(given: Any) -> list[str]:
    """Return `vllm_server_options` as words of vLLM's command.

    `--name=value`, `--name` for true, `--no-name` for false, a mapping as JSON. Raises ConfigError if it is no
    mapping, or if another setting decides an option.
    """
    try:
        options = json.loads(given) if isinstance(given, str) else given or {}
    except ValueError:
        options = None
    if not isinstance(options, Mapping):
        raise ConfigError(f"vllm_server_options={given!r} must be a mapping, such as {{'kv_cache_dtype': 'fp8'}}.")
    words = []
    for name, value in options.items():
        flag = str(name).replace("_", "-")
        is_option = re.fullmatch(r"[a-z][a-z0-9-]*", flag) and isinstance(value, bool | int | float | str | Mapping)
        if not is_option or flag in _DECIDED:
            raise ConfigError(
                f"vllm_server_options has {name!r}: {value!r}. Write options of `vllm serve` without dashes in front, "
                "as numbers, texts, true, false or mappings, and none that another setting or the launcher decides."
            )
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={text}")
    return words


def starts() -> str:
    """Return how often each server of this run has been started, as the launcher writes it; "" without servers."""
    path = os.environ.get(STARTS_VARIABLE)
    return Path(path).read_text(encoding="utf-8") if path else ""
