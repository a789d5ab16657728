r"""Honest completions in ten languages are paid; with another value, hedged or denied they never are.

A form holds `{}` for the answer. Each is tried with a number under `Answer` and `Math`, with a letter under both, and
with a word as `exact`, where the table of its language has these.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from trl_ext.rewards import Answer, Math, Row


@dataclass(frozen=True)
class Forms:
    """How a language states an answer of any kind, a number and a letter; what it puts between two; how it denies."""

    stated: tuple[str, ...]
    numbers: tuple[str, ...]
    letters: tuple[str, ...]
    hedges: tuple[str, ...]
    denied: tuple[str, ...]
    word: str


LANGUAGES = {
    language: Forms(**forms)
    for language, forms in json.loads(Path(__file__).with_name("languages.json").read_text(encoding="utf-8")).items()
}
RIGHT, WRONG = {"number": "42", "choice": "B"}, {"number": "43", "choice": "C"}
RULES = {
    "number": (Answer(), Math()),
    "choice": (Answer(kind="choice"), Math(gold="maths"), Math()),
    "exact": (Answer(kind="exact"),),
}


def paid(kind: str, text: str, gold: str) -> list[bool]:
    """Whether the rules of a kind pay a text, one for each of them."""
    row = Row(None, text, None, {"answer": gold, "maths": rf"\text{{({gold})}}"})
    return [rule.score(row).value == 1.0 for rule in RULES[kind]]


def honest(kind: str, forms: Forms) -> list[str]:
    own = {"number": forms.numbers, "choice": forms.letters, "exact": ()}[kind]
    return [form.format(RIGHT.get(kind, forms.word)) for form in forms.stated] + list(own)


def test_honest_completions_of_ten_languages_are_paid():
    tried = refused = 0
    lost = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            for text in honest(kind, forms):
                verdicts = paid(kind, text, RIGHT.get(kind, forms.word))
                tried += len(verdicts)
                refused += verdicts.count(False)
                if not all(verdicts):
                    lost.append((language, kind, text, verdicts))
    assert tried >= 218
    assert refused / tried <= 8 / 218, lost


def test_no_wrong_answer_in_these_forms_is_paid():
    found = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            right = RIGHT.get(kind, forms.word)
            for text in honest(kind, forms):
                wrong = text.replace(right, WRONG.get(kind, "Zagreb")).replace("orty-two", "orty-three")
                if any(paid(kind, wrong, right)):
                    found.append((language, kind, wrong))
    assert found == []


def test_no_hedge_and_no_denial_is_paid():
    found = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            right, wrong = RIGHT.get(kind, forms.word), WRONG.get(kind, "Zagreb")
            hedges = [
                hedge.format(*pair)
                for hedge in forms.hedges
                for pair in ((right, wrong), (wrong, right), (f"${right}$", f"${wrong}$"))
            ]
            texts = [form.format(hedge) for form in forms.stated for hedge in hedges]
            for text in (*texts, *(form.format(right) for form in forms.denied)):
                if any(paid(kind, text, right)):
                    found.append((language, kind, text, paid(kind, text, right)))
    assert found == []
