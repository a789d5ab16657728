"""Installed packages and the versions that they must have; `pip check` compares their own requirements.

Windows of torch, transformers and TRL are in `SUPPORTED`, and TRL's requirements give vLLM's. The others are here, and
a test compares them with the package's requirements.
"""

from importlib.metadata import PackageNotFoundError, requires

from trl_ext.compat.versions import SUPPORTED, installed_versions, seam_problem, untested, untested_sentence
from trl_ext.doctor.finding import Finding, note, problem

# Package: lowest version.
REQUIRED = {"accelerate": "1.13", "datasets": "4.0", "peft": "0.18"}
OPTIONAL = {"deepspeed": "0.19", "flash-attn": "2.7"}
WITHOUT_WINDOW = ("vllm", "bitsandbytes", "ninja", "liger-kernel", "kernels", "flash-attn-3", "flash-attn-4")


def holds(window: str, version: str) -> bool:
    """Return True if the version is in a window in pip's notation; a local part such as +cu128 does not matter."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(window).contains(version, prereleases=True)


def required_windows() -> dict[str, str]:
    """Return the versions of the packages that every training needs, in pip's notation: ">=1.16,<2"."""
    theirs = {package: f">={low}" + (f",<{high}" if high else "") for package, (low, high) in SUPPORTED.items()}
    return theirs | {package: f">={low}" for package, low in REQUIRED.items()}


def optional_windows(vllm: str) -> dict[str, str]:
    """Return the versions of the packages that some runs need, "" for any; `vllm` is the installed TRL's window."""
    ours = {package: f">={low}" for package, low in OPTIONAL.items()}
    return {**ours, "vllm": vllm, "bitsandbytes": "", "liger-kernel": ""}


def untested_findings() -> tuple[Finding, ...]:
    """Return findings about versions that are newer than the tested versions; their seams are inspected."""
    if missing := seam_problem():
        what, _, remedy = missing.partition(" Run: ")
        return (problem("versions", what, remedy),)
    if newer := untested():
        advice = "All names that it builds on are there; packing is checked as always."
        return (note("versions", untested_sentence(newer), advice),)
    return ()


def versions() -> dict[str, str | None]:
    """Return the installed version of every package that matters, None if it is missing."""
    names = (*SUPPORTED, *REQUIRED, *OPTIONAL, *WITHOUT_WINDOW)
    return {name: installed_version(name) for name in names}


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, None if it is missing."""
    try:
        return installed_versions(package)[package]
    except PackageNotFoundError:
        return None


def window_of(package: str, user: str) -> str:
    """Return the versions of a package that the installed `user` takes, in pip's notation; "" if it gives none."""
    from packaging.requirements import Requirement

    wishes = map(Requirement, requires(user) or ()) if installed_version(user) else ()
    return next((str(wish.specifier) for wish in wishes if wish.name == package), "")
