"""Bytes in the unit that is printed: GiB (2**30), never GB."""

GIB = 2**30


def gib(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return num_bytes / GIB


def in_gib(num_bytes: float) -> str:
    """Format bytes for a sentence: "17.4 GiB"."""
    return f"{gib(num_bytes):.1f} GiB"
