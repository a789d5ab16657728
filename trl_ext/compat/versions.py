"""Installed versions, supported versions, and names that untested versions lack."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from trl_ext.errors import ConfigError, SupportError

# Package: lowest version that works, first version that does not.
SUPPORTED = {
    "torch": ("2.11", None),
    "transformers": ("5.17", None),
    "trl": ("1.16", "2"),
}
# Package: the newest minor version with which all tests ran. Its patches count as tested.
TESTED = {
    "torch": "2.13",
    "transformers": "5.24",
    "trl": "1.16",
    "accelerate": "1.15",
    "deepspeed": "0.19",
    "peft": "0.21",
}
# The extra `vllm` resolves to these; `make resolve` compares.
RESOLVED_WITH_VLLM = {"vllm": "0.31.0", "transformers": "5.17.0", "torch": "2.13.0"}


def check_versions() -> None:
    """Raise an error for an unsupported version or a missing seam; warn once of untested versions but torch's.

    Raises:
        ConfigError: Unsloth is imported, which replaces TRL's trainers and the layers of models in place.
        SupportError: A package of `SUPPORTED` is missing or outside its window, or a version newer than `TESTED` lacks
            a seam.
    """
    from packaging.version import Version

    if "unsloth" in sys.modules:
        raise ConfigError(
            "unsloth is imported, which replaces parts of TRL and transformers that trl_ext builds on. Leave its "
            "import out, or take the trainers from trl."
        )
    for package, (low, high) in SUPPORTED.items():
        try:
            found = Version(version(package))
        except PackageNotFoundError as error:
            raise SupportError(f"{package} is not installed. Run: pip install '{package}>={low}'") from error
        if found < Version(low) or (high is not None and found >= Version(high)):
            wanted = f"{package}>={low}" + (f",<{high}" if high else "")
            raise SupportError(f"{package} {found} is outside the supported window. Run: pip install '{wanted}'")
    if problem := seam_problem():
        raise SupportError(problem)
    # An installer takes torch's newest release, whose public names last: `check` and `doctor` give its version.
    _warn_once(tuple(sorted(untested().keys() - {"torch"})))


def untested() -> dict[str, str]:
    """Return the installed version of each package that is newer than its tested version."""
    from packaging.version import Version

    found = {}
    for package, tested in TESTED.items():
        with suppress(PackageNotFoundError):
            if Version(version(package)).release[:2] > Version(tested).release:
                found[package] = version(package)
    return found


def untested_sentence(packages: Iterable[str]) -> str:
    """Return a sentence with the installed and the tested version of packages."""
    named = (f"{package} {version(package)} (tested: up to {TESTED[package]})" for package in packages)
    return f"Newer than what trl_ext was tested with: {', '.join(named)}."


def seam_problem() -> str:
    """Return a sentence for the first seam that untested versions lack; "" if there is none.

    Tested versions are not inspected. Others are inspected once: a file in `extensions_folder` lists the environments
    that passed.
    """
    if not (newer := untested()):
        return ""
    from trl_ext.compat.seams import SEAMS

    places = {name: Path(spec.origin) for name in TESTED if (spec := find_spec(name)) and spec.origin}
    environment = [(version(name), str(path), path.stat().st_mtime_ns) for name, path in places.items()]
    mark, kept = sha256(repr((environment, SEAMS)).encode()).hexdigest(), extensions_folder() / "trl_ext_seams"
    with suppress(OSError):
        if mark in kept.read_text(encoding="ascii"):
            return ""
    # DeepSpeed's names depend on no other package, and its import takes seconds.
    looked_at = places.keys() - ({"deepspeed"} - newer.keys())
    # TRL's experimental modules move when they are stable, and the one trainer that needs them looks for itself.
    for seam in (one for one in SEAMS if not one.where.startswith("trl.experimental")):
        if seam.package in looked_at and (problem := seam.problem):
            blamed = [seam.package] if seam.package in newer else list(newer)
            remedy = " ".join(f"'{package}=={TESTED[package]}.*'" for package in blamed)
            return (
                f"trl_ext builds on {seam.where}, which {problem}. What for: {seam.why}. {untested_sentence(blamed)} "
                f"Run: pip install {remedy}"
            )
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a", encoding="ascii") as file:
            file.write(f"{mark}\n")
    return ""


@cache
def _warn_once(packages: tuple[str, ...]) -> None:
    if packages and os.environ.get("RANK", "0") == "0":
        what = f"{untested_sentence(packages)} All names that it builds on are there; packing is checked as always."
        print(f"\nwarning: {what}\n", file=sys.stderr, flush=True)


def extensions_folder() -> Path:
    """Return the folder where torch compiles helpers: TORCH_EXTENSIONS_DIR, else a folder of the cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions").expanduser()


def is_older(package: str, than: str) -> bool:
    """Return True if the installed version of the package comes before the version `than`."""
    from packaging.version import Version

    return Version(version(package)) < Version(than)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package, for reports."""
    return {package: version(package) for package in packages}


@cache
def is_installed(module: str) -> bool:
    """Return True if the module can be imported; does not import it."""
    return find_spec(module) is not None
