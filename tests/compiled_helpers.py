"""A folder of one test run's own for the helpers that DeepSpeed compiles, with those that earlier runs compiled.

torch guards the build of a helper with a file named `lock`. A build that is killed leaves it behind, and everybody who
needs that helper later waits for its removal forever. In a folder of its own, a test run meets no lock of another one.
"""

import fcntl
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@contextmanager
def own_folder(store: Path) -> Iterator[Path]:
    """Yield a new folder that holds the helpers in `store`, and at the end put those that are newer there into it."""
    with tempfile.TemporaryDirectory(prefix="compiled_helpers") as name:
        folder = Path(name)
        with _locked(store):
            for helper in _finished(store):
                shutil.copytree(helper, folder / helper.name)
        yield folder
        with _locked(store):
            for helper in _finished(folder):
                kept = store / helper.name / f"{helper.name}.so"
                if kept.exists() and kept.stat().st_mtime_ns >= (helper / kept.name).stat().st_mtime_ns:
                    continue  # not built here, or by another run since
                part = store / f"{helper.name}.part"
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(helper, part)
                shutil.rmtree(store / helper.name, ignore_errors=True)
                part.rename(store / helper.name)


def quick_compiler(store: Path) -> None:
    """Compile helpers with little optimisation and nothing for debuggers: in about half of the time.

    The compiler's path is part of what ninja compares: one that changes would have each test run compile all again.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    script, new = store / "c++", store / f"c++.{os.getpid()}"  # torch looks at the name
    if compiler is None or compiler == str(script):  # the latter inside of another test run
        return
    new.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -O1 -g0\n')
    new.chmod(0o755)
    new.replace(script)
    os.environ["CXX"] = str(script)


def name_of_versions() -> str:
    """A folder's name: helpers compiled for one Python, torch and DeepSpeed are of no use to others."""
    names = [f"python{sys.version_info.major}.{sys.version_info.minor}"]
    for package in ("torch", "deepspeed"):
        try:
            names.append(f"{package}{version(package)}")
        except PackageNotFoundError:
            names.append(f"no-{package}")
    return "_".join(names)


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Let one test run at a time read or write the store. The lock ends with the process, even with a killed one."""
    store.mkdir(parents=True, exist_ok=True)
    with (store / "one_run_at_a_time").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finished(folder: Path) -> list[Path]:
    """The folders of helpers that are built and that nobody is building."""
    helpers = [path for path in folder.iterdir() if (path / f"{path.name}.so").exists()]
    return [path for path in helpers if not (path / "lock").exists()]
