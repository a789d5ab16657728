"""Which packages are installed, and in which window they must be; `pip check` compares their own requirements.

The windows of torch, transformers and TRL are `SUPPORTED`; which vLLM goes is TRL's to say. The rest is here,
and a test holds it to the package's own requirements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from trl_ext.compat.versions import SUPPORTED, installed_versions, seam_problem, untested, untested_sentence
from trl_ext.doctor.finding import Finding, note, problem

# Package: least version.
REQUIRED = {"accelerate": "1.13", "datasets": "4.0", "peft": "0.18"}
OPTIONAL = {"deepspeed": "0.19", "flash-attn": "2.7"}
WITHOUT_WINDOW = ("vllm", "bitsandbytes", "ninja", "liger-kernel", "kernels", "flash-attn-3")


@dataclass(frozen=True, slots=True)
class Window:
    """Versions of a package that work.

    Args:
        package: As pip calls it.
        wanted: As pip writes it: ">=1.15,<2"; "" for any.
    """

    package: str
    wanted: str

    def holds(self, version: str) -> bool:
        """True if the version lies in the window; a local part such as +cu128 does not matter."""
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.wanted).contains(version, prereleases=True)


def required_windows() -> Iterator[Window]:
    """The windows of packages without which nothing trains."""
    for package, (low, high) in SUPPORTED.items():
        yield Window(package, f">={low}" + (f",<{high}" if high else ""))
    yield from (Window(package, f">={low}") for package, low in REQUIRED.items())


def optional_windows(vllm: str) -> Iterator[Window]:
    """The windows of packages that some runs need.

    Args:
        vllm: Which vLLM the installed TRL takes.
    """
    yield from (Window(package, f">={low}") for package, low in OPTIONAL.items())
    yield Window("vllm", vllm)
    yield Window("bitsandbytes", "")
    yield Window("liger-kernel", "")


def untested_findings() -> tuple[Finding, ...]:
    """What is known of versions that are newer than what was tested, for which the seams are looked at."""
    if missing := seam_problem():
        what, _, remedy = missing.partition(" Run: ")
        return (problem("versions", what, remedy),)
    if newer := untested():
        advice = "All names that it builds on are there; packing is checked as always."
        return (note("versions", untested_sentence(newer), advice),)
    return ()


def versions() -> dict[str, str | None]:
    """The installed version of every package that matters, None for a missing one."""
    names = (*SUPPORTED, *REQUIRED, *OPTIONAL, *WITHOUT_WINDOW)
    return {name: installed_version(name) for name in names}


def installed_version(package: str) -> str | None:
    """The installed version of a package, None if it is missing."""
    try:
        return installed_versions(package)[package]
    except PackageNotFoundError:
        return None


def vllm_window() -> str:
    """Which vLLM the installed TRL takes, in pip's words; "" if it does not say."""
    from packaging.requirements import Requirement

    wishes = map(Requirement, requires("trl") or ()) if installed_version("trl") else ()
    return next((str(wish.specifier) for wish in wishes if wish.name == "vllm"), "")
