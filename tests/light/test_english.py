"""Plain English: the words that CONTRIBUTING asks not to use become fewer, in every room and kind of text."""

import json

import pytest

from tests import english
from tests.conftest import ROOT


def hits(text: str, kind: str = "messages") -> list[str]:
    """Names of the forms that a text uses."""
    return [name for _, name, _ in english.Text("trl_ext/cli/x.py", 1, kind, text).hits]


@pytest.mark.slow
def test_no_room_and_kind_is_above_its_ceiling():
    """Lower a ceiling by `python -m tests.english --lower`; a new room starts at 15 per 10,000 and no name.

    A twentieth above is allowed: a rate rises when text without a hit is removed.
    """
    found, ceilings = english.texts(), json.loads(english.CEILINGS.read_text())
    above = []
    for room, kinds in english.rates(found).items():
        for kind, rate in kinds.items():
            ceiling = ceilings.get(room, {}).get(kind, 0 if kind == "names" else 15)
            if rate > (ceiling if kind == "names" else 1.05 * ceiling):
                lines = "\n  ".join(english.worst(found, room, kind))
                above.append(f"{room}, {kind}: {rate:.1f}, ceiling {ceiling}. Reword some, first:\n  {lines}")
    assert not above, "\n".join(above)


def test_contributing_names_every_form_that_is_counted():
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    (listed,) = [part for part in text.split("* **") if part.startswith("Words not to use.")]
    assert not [name for name in english.FORMS if name not in listed]


@pytest.mark.parametrize(
    "text, form",
    [
        ("The server says no.", "says"),
        ("A folder of its own.", "of its own"),
        ("Rows\nbehind it.", "behind"),
        ("It stands for a model.", "stands"),
        ("Read from what is printed.", "what ... is"),
        ("What is printed, in bytes.", "what ... is"),
        ("Give a longer one, or none.", "one"),
        ("Rows of another rank and the own.", "own"),
        ("Rank 0, and no more.", "no more"),
    ],
)
def test_a_form_is_found(text, form):
    assert form in hits(text)


@pytest.mark.parametrize(
    "text",
    [
        "What is wrong?",
        "State what to do.",
        "A stand-in, at no more than one process.",
        "Its own tokens, one by one; the understanding of alikeness.",
    ],
)
def test_plain_english_is_not(text):
    assert not hits(text)


def test_a_docstring_begins_with_a_verb_or_a_noun_and_a_function_with_a_verb():
    assert hits("As a term.", "docstrings") == ["opener"] and not hits("As a term.", "comments")
    assert not hits("Return a term.", "docstrings")
    names = ("settled", "told_if", "_noted", "need", "padded_rows", "settle")
    assert [bool(english.PARTICIPLE.fullmatch(name)) for name in names] == [True, True, True, False, False, False]
