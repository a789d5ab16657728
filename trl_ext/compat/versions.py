"""Which versions are installed, and which we support."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from trl_ext.errors import SupportError

# Package: lowest version that works, first version that is not tested.
SUPPORTED = {
    "torch": ("2.11", None),
    "transformers": ("5.17", None),
    "trl": ("1.15", "1.17"),
}


def check_versions() -> None:
    """Stop early on a version outside the support window.

    Raises:
        SupportError: a package of `SUPPORTED` is missing or outside its window.
    """
    from packaging.version import Version

    for package, (low, high) in SUPPORTED.items():
        try:
            found = Version(version(package))
        except PackageNotFoundError as error:
            raise SupportError(f"{package} is not installed. Run: pip install '{package}>={low}'") from error
        if found < Version(low) or (high is not None and found >= Version(high)):
            wanted = f"{package}>={low}" + (f",<{high}" if high else "")
            raise SupportError(f"{package} {found} is outside the supported window. Run: pip install '{wanted}'")


def is_older(package: str, than: str) -> bool:
    """Return True if the installed version of the package comes before the version `than`."""
    from packaging.version import Version

    return Version(version(package)) < Version(than)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package, for reports."""
    return {package: version(package) for package in packages}


@cache
def is_installed(module: str) -> bool:
    """Return True if the module can be imported; it is looked for, not imported."""
    return find_spec(module) is not None
