"""Installed packages and the versions that they must have; `pip check` compares their own requirements.

Windows of torch, transformers and TRL are in `SUPPORTED`, and TRL's requirements give vLLM's. The others are here, and
a test compares them with the package's requirements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from trl_ext.compat.versions import SUPPORTED, installed_versions, seam_problem, untested, untested_sentence
from trl_ext.doctor.finding import Finding, note, problem

# Package: lowest version.
REQUIRED = {"accelerate": "1.13", "datasets": "4.0", "peft": "0.18"}
OPTIONAL = {"deepspeed": "0.19", "flash-attn": "2.7"}
WITHOUT_WINDOW = ("vllm", "bitsandbytes", "ninja", "liger-kernel", "kernels", "flash-attn-3")


@dataclass(frozen=True, slots=True)
class Window:
    """Versions of a package that work.

    Args:
        package: pip's name.
        wanted: pip's notation: ">=1.15,<2"; "" for any.
    """

    package: str
    wanted: str

    def holds(self, version: str) -> bool:
        """Return True if the version is in the window; a local part such as +cu128 does not matter."""
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.wanted).contains(version, prereleases=True)


def required_windows() -> Iterator[Window]:
    """Yield the windows of packages that every training needs."""
    for package, (low, high) in SUPPORTED.items():
        yield Window(package, f">={low}" + (f",<{high}" if high else ""))
    yield from (Window(package, f">={low}") for package, low in REQUIRED.items())


def optional_windows(vllm: str) -> Iterator[Window]:
    """Yield the windows of packages that some runs need; `vllm` is the window of the installed TRL."""
    yield from (Window(package, f">={low}") for package, low in OPTIONAL.items())
    yield Window("vllm", vllm)
    yield Window("bitsandbytes", "")
    yield Window("liger-kernel", "")


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


def vllm_window() -> str:
    """Return the versions of vLLM that the installed TRL takes, in pip's notation; "" if it gives none."""
    from packaging.requirements import Requirement

    wishes = map(Requirement, requires("trl") or ()) if installed_version("trl") else ()
    return next((str(wish.specifier) for wish in wishes if wish.name == "vllm"), "")
