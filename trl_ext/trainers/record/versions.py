"""What stands in versions.json: on what a run runs."""

import platform
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch

from trl_ext.compat.versions import installed_versions
from trl_ext.resources import __version__
from trl_ext.trainers.record.launch import launch_line

_PACKAGES = ("trl", "transformers", "torch", "accelerate", "deepspeed", "peft", "datasets", "vllm")


def versions_of(trainer: Any) -> dict[str, Any]:
    """Return the content of versions.json, see `RunRecord`."""
    return {
        "trainer": trainer.memory_kind,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_processes": trainer.args.world_size,
        "launch": launch_line(),
        "packages": packages(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "commit": commit_of(Path.cwd()),
    }


@cache
def packages() -> dict[str, str]:
    """Return the installed version of each package that a run is made of, trl_ext first."""
    found = {"trl_ext": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found |= installed_versions(name)
    return found


@cache
def commit_of(folder: Path) -> str | None:
    """Return the git commit that a folder stands at, read from git's files; None where that is not known."""
    git = next((parent / ".git" for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if git is None:
        return None
    with suppress(OSError, UnicodeDecodeError):
        if git.is_file():  # of a work tree: `gitdir: <folder>`
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, shared = head.removeprefix("ref: "), git / "commondir"
        common = git / shared.read_text().strip() if shared.is_file() else git
        if (common / name).is_file():
            return (common / name).read_text().strip()
        lines = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
    return None
