"""A finding: what was checked, its state, whether it hurts, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a report.

    Args:
        level: "ok"; "note", worth knowing; "problem", training cannot work.
        subject: The checked part, in a word or two.
        what: Its state, as a sentence with numbers.
        advice: What to do, as a sentence; "" if nothing.
    """

    level: str
    subject: str
    what: str
    advice: str = ""


def ok(subject: str, what: str) -> Finding:
    return Finding("ok", subject, what)


def note(subject: str, what: str, advice: str = "") -> Finding:
    return Finding("note", subject, what, advice)


def problem(subject: str, what: str, advice: str = "") -> Finding:
    return Finding("problem", subject, what, advice)


def all_well(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is a problem."""
    return not any(finding.level == "problem" for finding in findings)
