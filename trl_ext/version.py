"""The version of the package, for every room and for the build."""

__version__ = "0.1.0"
