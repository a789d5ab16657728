"""The rows that cheats are tried on, and what honest completions of them look like."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trl_ext.rewards.auditing.audit import gold_key
from trl_ext.rewards.rule import Rule, ideal_of
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.tags import Tags
from trl_ext.rewards.totals.shaping import applies


@dataclass(frozen=True, slots=True)
class Target:
    """A row to cheat on.

    Args:
        prompt: As rules get it.
        columns: As rules get them.
        gold: The right answer as short text; None where it is not known.
        wrong, other: Two wrong answers of the same kind.
        completion: A good completion, for rules of style.
    """

    prompt: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    gold: str | None = None
    wrong: str = "something else"
    other: str = "nothing of the kind"
    completion: str | None = None


# How completions show their answer.
_SHAPES = (
    "{text} {answer}",
    "{text} The answer is {answer}.",
    "{text} \\boxed{{{answer}}}",
    "{text}\nA: {answer}",
    "{text}\n#### {answer}",
    "<answer>{answer}</answer>",
    "<think>{text}</think>\n{answer}",
    "<think>{text}</think>\nThe answer is \\boxed{{{answer}}}.",
    "<think>{text}</think>\n<answer>{answer}</answer>",
    '{{"answer": "{answer}"}}',
)
_OPENERS = ("First,", "Then", "Here", "After that", "In the same way", "As asked,", "With this", "Finally")
_CLAUSES = (
    "the question names what is given",
    "each part is looked at alone",
    "nothing else in the text matters",
    "the pieces are put together again",
    "a short look back shows no mistake",
    "what remains is easy to see",
    "we write down what we know",
    "the next step uses the one before",
    "a second way leads to the same place",
    "the units agree on both sides",
    "one case can be left out",
)
_LETTERS = "ABCDEAB"
_SENTENCES = (0, 4, 16, 60)  # of filler: rules of length have honest completions to compare with


def of_data(rules: Sequence[Rule], rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The user's rows, with wrong answers that look like their right ones."""
    golds = [_gold_of(rules, row, index) for index, row in enumerate(rows)]
    known = [gold for gold in golds if gold is not None]
    targets = []
    for row, gold in zip(rows, golds, strict=True):
        columns = {name: cell for name, cell in row.items() if name not in ("prompt", "completion")}
        target = Target(row.get("prompt"), columns, gold, completion=row.get("completion"))
        if gold is not None:
            wrong, other = wrong_answers(gold, known)
            target = replace(target, wrong=wrong, other=other)
        targets.append(target)
    return targets


def _gold_of(rules: Sequence[Rule], row: Mapping[str, Any], index: int) -> str | None:
    """The row's right answer, from the first rule that judges it and can say."""
    for rule in rules:
        if rule.judges_correctness and applies(rule.when, row):
            ideal = ideal_of(rule, row, index)
            if ideal is not None:
                before, behind = frame_of(ideal)
                return ideal[len(before) : len(ideal) - len(behind)]
    return None


def frame_of(ideal: str) -> tuple[str, str]:
    r"""Return what stands before and behind the answer in an ideal completion.

    Example:
        >>> frame_of(r"\boxed{18}"), frame_of("The answer is 18"), frame_of("Paris")
        (('\\boxed{', '}'), ('The answer is ', ''), ('', ''))
    """
    for before, behind in (("<answer>", "</answer>"), ("\\boxed{", "}"), ("The answer is ", "")):
        if ideal.startswith(before) and ideal.endswith(behind):
            return before, behind
    return "", ""


def wrong_answers(gold: str, golds: Sequence[str]) -> tuple[str, str]:
    """Two wrong answers of the gold's kind: another digit or letter, or else texts that are right on other rows.

    Example:
        >>> wrong_answers("18", ()), wrong_answers("E", ()), wrong_answers("Paris", ("Rome", "Paris", "7", "Bonn"))
        (('28', '38'), ('A', 'B'), ('Rome', 'Bonn'))
    """
    digit = re.search("[0-9]", gold)
    if digit:
        return _with_digit(gold, digit.start(), 1), _with_digit(gold, digit.start(), 2)
    if gold in tuple(_LETTERS[:5]):
        start = _LETTERS.index(gold) + 1
        return _LETTERS[start], _LETTERS[start + 1]
    texts = [text for text in golds if not re.search("[0-9]", text) and gold_key(text) != gold_key(gold)]
    wrong, other = [*dict.fromkeys(texts), "something else", "nothing of the kind"][:2]
    return wrong, other


def _with_digit(gold: str, position: int, more: int) -> str:
    """The gold with another digit there; never 0, which could make a number shorter or a fraction infinite."""
    digit = (int(gold[position]) + more - 1) % 9 + 1
    return f"{gold[:position]}{digit}{gold[position + 1 :]}"


def honest(rules: Sequence[Rule], answer: str, shape: str | None) -> Iterator[str]:
    """Completions of an honest try that ends in this answer, in many shapes and lengths."""
    words = " ".join(keywords_of(rules))
    for num_sentences in _SENTENCES:
        text = " ".join([*filler(num_sentences), words]).strip()
        for template in _SHAPES:
            yield template.format(text=text, answer=answer)
        if tags := tags_of(rules):
            thoughts = [f"<{tag}>{text or 'So it is.'}</{tag}>" for tag in tags[:-1]]
            yield "\n".join([*thoughts, f"<{tags[-1]}>{answer}</{tags[-1]}>"])
        if shape is not None:
            yield shape.replace("[text]", text or "So it is.").replace("[answer]", answer)


def filler(num_sentences: int) -> Iterator[str]:
    """Sentences that say little and repeat no phrase soon."""
    for i in range(num_sentences):
        opener, clause = _OPENERS[i % len(_OPENERS)], _CLAUSES[(i + i // 88) % len(_CLAUSES)]
        yield f"{opener} {clause}."


def keywords_of(rules: Sequence[Rule]) -> list[str]:
    """Every keyword that the rules require, as often as they do."""
    entries: list[Any] = [entry for rule in rules if isinstance(rule, Keywords) for entry in rule.required]
    return [word for entry in entries for word in ([entry] if isinstance(entry, str) else [entry[0]] * entry[1])]


def tags_of(rules: Sequence[Rule]) -> list[str]:
    """Every tag that the rules require, in their order, each once."""
    return list(dict.fromkeys(tag for rule in rules if isinstance(rule, Tags) for tag in rule.tags))
