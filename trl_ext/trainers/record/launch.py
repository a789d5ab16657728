"""The line that launched this run, without secrets."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trl_ext.rewards.text.secrets import HIDDEN, names_secret, public

# Programs, and modules for `python -m`, that start processes and wait for them.
LAUNCHERS = frozenset(
    "accelerate accelerate-launch deepspeed torchrun trl-ext accelerate.commands.launch deepspeed.launcher.launch "
    "torch.distributed.launch torch.distributed.run trl_ext.cli.main".split()
)


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
    # `/usr/bin/python3 -u -m accelerate.commands.launch` has 4 words; later words are the launcher's arguments.
    return any(Path(word).name in LAUNCHERS for word in command_line(pid)[:4])


def command_line(pid: int) -> list[str]:
    """Return the words with which a process was started; empty if the system does not provide them."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with "..." instead of secrets."""
    shown: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        flag, equals, _ = word.partition("=")
        if last.startswith("--") and names_secret(last) and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if equals and names_secret(flag) else public(word))
    return shown
