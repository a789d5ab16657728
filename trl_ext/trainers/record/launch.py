"""The line that launched this run, and what of it no file may hold."""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Programs, and modules behind `python -m`, that start processes and wait for them.
LAUNCHERS = frozenset(
    "accelerate accelerate-launch deepspeed torchrun trl-ext accelerate.commands.launch deepspeed.launcher.launch "
    "torch.distributed.launch torch.distributed.run trl_ext.cli.main".split()
)
# Names of settings and environment variables whose values are secrets. `pad_token` and `stop_token` are none, nor is
# `api_key_env`, which holds a variable's name.
_SECRET_NAME = re.compile(
    r"(^|_)(hub|hf|auth|access|api|bearer|session|refresh|wandb|github)_?token$|^(use_auth_)?token$"
    r"|api_?key(?!_env)|secret|passw|credential|private_?key|authorization|cookie",
    re.IGNORECASE,
)
# Tokens of the services that runs talk to, what stands before @ in an address, and what follows "Bearer".
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[opsu]_\w{16,}|github_pat_\w{16,}|(?<=://)[^/\s@]+(?=@)"
    r"|(?<=Bearer )[^\s\"']+"
)
# A name and its text in JSON, whole or cut off, or in the query of an address.
_ENTRY = re.compile(r"""((?:["']([^"'\s]+)["']\s*:\s*["']|[?&]([\w.-]+)=))((?<=["'])[^"']*|[^"'&\s]*)""")
# Environment variables of a recipe whose values are shown: those of libraries that hold no secrets in them.
_SHOWN_VARIABLE = re.compile(
    r"(PYTORCH|TORCH|CUDA|NCCL|GLOO|OMP|MKL|TOKENIZERS|VLLM|TRITON|TRL_EXT|DS|ACCELERATE|HF_HUB|HF_DATASETS)_"
    r"|(HF_HOME|WANDB_PROJECT|WANDB_MODE)$"
)
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
        if last.startswith("--") and names_secret(last) and not word.startswith("-"):
            shown.append(_HIDDEN)
        else:
            shown.append(f"{flag}={_HIDDEN}" if equals and names_secret(flag) else public(word))
    return shown


def public(value: Any) -> Any:
    """Return plain data without its secrets: entries that are named like one left out, tokens in texts hidden.

    Of a recipe's block `env` the values are None but those of libraries' own variables.
    """
    if isinstance(value, Mapping):
        shown = {key: public(item) for key, item in value.items() if not names_secret(key)}
        if isinstance(env := shown.get("env"), dict):
            shown["env"] = {name: env.get(name) if _SHOWN_VARIABLE.match(name) else None for name in value["env"]}
        return shown
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):  # a mapping as the command line has it
        with suppress(ValueError, RecursionError):
            mapping = json.loads(value)
            return value if public(mapping) == mapping else json.dumps(public(mapping))
    text = _ENTRY.sub(lambda m: m[1] + (_HIDDEN if names_secret(m[2] or m[3]) else m[4]), value)
    return _SECRET_VALUE.sub(_HIDDEN, text)


def names_secret(name: Any) -> bool:
    """Return True for the name of a setting, variable or flag whose value no file may hold."""
    return bool(_SECRET_NAME.search(str(name).lstrip("-").replace("-", "_")))
