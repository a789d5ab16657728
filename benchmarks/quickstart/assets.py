"""What `make quickstart` trains on: a small chat model and one-digit sums, prepared once in a cache folder.

In a checkout `python -m benchmarks.quickstart.assets` prints the folder on stdout and everything else on stderr. It is
$TRL_EXT_CACHE, else $XDG_CACHE_HOME/trl_ext, else ~/.cache/trl_ext; in it `quickstart/model` and `quickstart/data`.
Each of the two is built beside its place and renamed into it, so a stopped run leaves nothing half-done there, and of
two runs at once the first to finish wins.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from trl_ext.scripts.exit import user_errors


def cache_folder() -> Path:
    """The folder that the model and the data are kept in."""
    if own := os.environ.get("TRL_EXT_CACHE"):
        return Path(own).expanduser() / "quickstart"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "trl_ext" / "quickstart"


def prepare() -> Path:
    """The folder with `model` and `data`, built where they are missing."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    build_once(folder / "model", _build_model)
    build_once(folder / "data", _build_data)
    return folder


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a folder that then becomes `target`, unless `target` exists already."""
    if target.exists():
        return
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        scratch.chmod(0o755)  # mkdtemp shuts everybody else out
        build(scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process finished first; anything else is a real failure.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _build_model(folder: Path) -> None:
    # Imported here: a second call must answer at once, and torch takes seconds to import.
    from .model import build_model

    build_model(folder)


def _build_data(folder: Path) -> None:
    from .sums import build_data

    build_data(folder)


def main() -> None:
    with user_errors():
        # Libraries print; only the path may reach stdout, which the shell captures.
        with contextlib.redirect_stdout(sys.stderr):
            folder = prepare()
        print(folder)


if __name__ == "__main__":
    main()
