"""The line that launched this run, and what of it no file may hold."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Programs, and modules behind `python -m`, that start processes and wait for them.
LAUNCHERS = frozenset(
    "accelerate accelerate-launch deepspeed torchrun trl-ext accelerate.commands.launch deepspeed.launcher.launch "
    "torch.distributed.launch torch.distributed.run trl_ext.cli.main".split()
)
# Names of settings and environment variables whose values are secrets. `pad_token` and `stop_token` are none.
_SECRET_NAME = re.compile(
    r"(^|_)(hub|hf|auth|access|api|bearer|session|refresh|wandb|github)_?token$|^(use_auth_)?token$"
    r"|api_?key|secret|passw|credential|private_?key",
    re.IGNORECASE,
)
# A token of the hub, and name and password within an address.
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}|(?<=://)[^/\s@:]+:[^/\s@]+(?=@)")
_HIDDEN = "..."


def launch_line() -> str | None:
    """Return the command that started this run, without secrets; None in a notebook or a shell."""
    launcher = os.getppid()
    words = command_line(launcher if is_launcher(launcher) else os.getpid())
    if len(words) < 2 or any("ipykernel" in word for word in words[:4]):
        return None
    shown = without_secrets([Path(words[0]).name, *words[1:]])
    return " ".join(shlex.quote(" ".join(word.split())) for word in shown)


def is_launcher(pid: int) -> bool:
    """Return True for a process whose command line names a launcher."""
    # As many words as `/usr/bin/python3 -u -m accelerate.commands.launch`: further ones are for the launcher.
    return any(Path(word).name in LAUNCHERS for word in command_line(pid)[:4])


def command_line(pid: int) -> list[str]:
    """Return the words with which a process was started, none where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with "..." in the place of secrets."""
    shown: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        flag, equals, _ = word.partition("=")
        if _names_secret(last) and not word.startswith("-"):
            shown.append(_HIDDEN)
        else:
            shown.append(f"{flag}={_HIDDEN}" if equals and _names_secret(flag) else _SECRET_VALUE.sub(_HIDDEN, word))
    return shown


def public(value: Any) -> Any:
    """Return plain data without its secrets: entries that are named like one left out, tokens in texts hidden."""
    if isinstance(value, Mapping):
        return {key: public(item) for key, item in value.items() if not _SECRET_NAME.search(str(key))}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    return _SECRET_VALUE.sub(_HIDDEN, value) if isinstance(value, str) else value


def _names_secret(flag: str) -> bool:
    return flag.startswith("--") and bool(_SECRET_NAME.search(flag[2:].replace("-", "_")))
