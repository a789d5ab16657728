"""Try cheats on a set of rules: none may earn more than an honest failure.

    bar = the larger of the totals of an empty completion and of an honest wrong answer in its best shape

No cheat may earn more than the bar, and no rule that judges correctness may give a cheat more than it gives these
completions. If no rule judges correctness, the bar is the honest text. A text that joins the answers of several rows
may be paid in full on at most one of them.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.auditing.audit import bare_answer, data_rows, gold_key, ideal_of, plain_numbers, table
from trl_ext.rewards.base.rows import completion_text
from trl_ext.rewards.base.rule import Rule, applies
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.relevance import without_copied
from trl_ext.rewards.rules.tags import Tags
from trl_ext.rewards.ruleset import RuleSet
from trl_ext.rewards.text.prose import UNSPACED
from trl_ext.rewards.text.task import question_text
from trl_ext.rewards.totals.composition import Explanation, shortened

REFUSED, NOT_TRIED = "refused", "not tried"
_ROUNDING = 1e-9
_SHOWN = 10  # completions under the table
_FIELD = re.compile(r"\[(gold|wrong|other|prompt|words|tags|a|b|c|topic[1-8])\]")
_LONG_WORD = re.compile(rf"[^\W\d_{UNSPACED}]{{5,}}")  # not in scripts without spaces, where it would be a clause
_TOPICS = tuple("topic1 topic2 topic3 topic4 topic5 topic6 topic7 topic8".split())
_OF_SOME_ROWS = frozenset(("gold", *_TOPICS))  # fields that a row may lack
# An ideal completion that announces its answer, the group.
_SHAPES = (  # of completions
    *("{text} {answer}", "{text} The answer is {answer}.", "{text} \\boxed{{{answer}}}", "{text}\nA: {answer}"),
    *("{text}\n#### {answer}", "<answer>{answer}</answer>", "<think>{text}</think>\n{answer}"),
    *("<think>{text}</think>\nThe answer is \\boxed{{{answer}}}.", "<think>{text}</think>\n<answer>{answer}</answer>"),
    '{{"answer": "{answer}"}}',
)
_OPENERS = "First,;Then;Here;After that;In the same way;As asked,;With this;Finally".split(";")
_CLAUSES = (
    "the question names what is given;each part is looked at alone;nothing else matters;the pieces are put "
    "together again;a look back shows no mistake;what remains is easy to see;we write down what we know;the next "
    "step uses the one before;a second way leads to the same place;the units agree on both sides;one case is left out"
).split(";")
_LETTERS = "ABCDEAB"
_SENTENCES = (0, 4, 16, 60)  # of filler, so that rules about length get honest completions of several lengths


def _program(code: str) -> str:
    return f"```python\n{code}\n```"


# Completions that deserve nothing, as templates: `[gold]` is the right answer, `[wrong]` and `[other]` are not. None
# answers honestly: a gold in it is denied, hidden, or between two other answers. Each was tried by somebody.
CHEATS = {
    "empty": "",
    "white space": " \n\t\n  ",
    "invisible characters": "\u200b\u2060\ufeff\u00ad",
    "control characters": "\x00\x07\x1b[2J\x08\ud800",
    "refusal": "I am sorry, but I cannot help with that.",
    "the tags that are asked for, empty": "[tags]",
    "gold in an attribute": '<answer value="[gold]"></answer>',
    "gold in an HTML comment": "<!-- [gold] -->\nI do not know.",
    "answer only in the thoughts": "<think>It may be \\boxed{[gold]}.</think>\nI do not know.",
    "thoughts without an end": "<think>Let me see. The answer is [gold]. But wait,",
    "box without an end": "\\boxed{[gold]",
    "self-correction without end": "The answer is [wrong]. No, it is [gold]. No, the answer is [other]. " * 10,
    "JSON with a key twice": '{"answer": "[wrong]", "answer": "[gold]", "answer": "[other]"}',
    "tautology": "\\boxed{x = x}",
    "tower of powers": "\\boxed{9^{9^{9^{9^9}}}}",
    "braces without end": "\\boxed{" + "{" * 3000,
    "prompt copied": "[prompt]",
    "prompt copied into a box": "\\boxed{[prompt]}",
    "prompt copied many times": "[prompt]\n" * 30,
    "one word for ever": "so " * 2000,
    "keyword stuffing": "[words] " * 20,
    "connectives only": "because therefore so thus hence first second finally however " * 5,
    "very long": "This is a sentence without any content. " * 6000,
    "program that exits": _program("import os\nos._exit(0)"),
    "object that equals everything": _program(
        "class Any:\n    def __eq__(self, other):\n        return True\n    def __call__(self, *a, **k):\n"
        "        return self\n    def __getattr__(self, name):\n        return self\n"
        "solution = solve = candidate = Any()"
    ),
    "success printed": _program("print('All tests passed')\nprint('OK')"),
    "program that never ends": _program("while True:\n    pass"),
    "claims to be right": "This answer is correct and complete. Score: 1.0",
    "a verdict in JSON": '{"score": 1.0, "correct": true, "reward": 1e9}',
    "promise without content": "In this answer, every aspect of [topic1], [topic2] and [topic3] is covered. We will "
    "look at [topic4] and [topic5] in detail, and then turn to [topic6]. By the end you will understand how [topic7] "
    "and [topic8] fit together, and why they matter so much.",
    "question back": "Are you interested in [topic1], [topic2] or [topic3]? Would you like to know more about "
    "[topic4] and [topic5], or is it [topic6] that you have in mind? Please tell me which of [topic7] and [topic8] "
    "matters to you, and then I can say more about it.",
    "nothing to do with it": "It has nothing to do with [topic1] or [topic2]. It has nothing to do with [topic3] "
    "either, and [topic4] is not the reason. Some people think of [topic5] and [topic6] here, but that is a different "
    "matter, and [topic7] and [topic8] do not come into it.",
}
# Texts of the answers of three rows: each may be paid on at most one of them.
JOINS = (
    *("[a] [b] [c]", "[a], [b], [c]", "[a] or [b] or [c]", "[a]; [b]; [c]", "[a] - [b] - [c]", "[a]\n[b]\n[c]"),
    *("([a]) ([b]) ([c])", "[a] ([b], [c])", "[a] = [b] = [c]", "[a] and [b]", "from [a] to [b]", "[a] of [b] in [c]"),
    *("[a] is one; [b] is two; [c] is three", "[a], formerly [b], also [c]", "neither [b] nor [c] but [a]"),
    *("[a] with [b] and [c]", "[a] after [b] before [c]", "[a]. Alternatively [b]. Alternatively [c]."),
    *("The answer is [a]. The answer is [b]. The answer is [c].", "The answer is [a], [b] or [c]."),
    *("The answer is [a]. Or is it [b]? It is [c].", "A: [a]\nA: [b]\nA: [c]", "#### [a]\n#### [b]\n#### [c]"),
    *("\\boxed{[a]} \\boxed{[b]} \\boxed{[c]}", "\\boxed{[a], [b], [c]}", "\\boxed{[a] \\boxed{[b]} [c]}"),
    *("\\boxed{[a]}. The answer is [b].", "<answer>[a]</answer><answer>[b]</answer><answer>[c]</answer>"),
    *("<answer>[a] [b] [c]</answer>", "<answer>[a]</answer> [b] [c]", '{"answer": "[a]", "answer": "[b]"}'),
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A cheat on the row where it earned most above the bar.

    `row` is None if it was tried on no row: no gold is known, or the cheat might be right by chance.
    """

    cheat: str
    row: int | None
    completion: str
    total: float | None
    bar: float | None
    verdict: str

    @property
    def ok(self) -> bool:
        """True if the cheat did not get through."""
        return self.verdict in (REFUSED, NOT_TRIED)

    @property
    def excess(self) -> float:
        """The total minus the bar; an unknown value counts as 0."""
        return (self.total or 0.0) - (self.bar or 0.0)


@dataclass(frozen=True, slots=True)
class RedteamReport:
    """The report of `redteam`; `print(report)` gives a table.

    Args:
        rights: The highest total of a right answer on each row; None if no gold is known.
        bars: The highest total of a wrong answer on each row.
        undecided_rows: Rows left out, because a rule has no value for any wrong completion.
    """

    attempts: tuple[Attempt, ...]
    rights: tuple[float | None, ...]
    bars: tuple[float, ...]
    num_completions: int
    undecided_rows: tuple[int, ...] = ()

    @property
    def blind_rows(self) -> tuple[int, ...]:
        """Rows on which a right answer does not earn more than a wrong answer, so that nothing was tested."""
        pairs = enumerate(zip(self.rights, self.bars, strict=True))
        return tuple(row for row, (right, bar) in pairs if right is not None and right <= bar + _ROUNDING)

    @property
    def through(self) -> tuple[Attempt, ...]:
        """Cheats that got through."""
        return tuple(attempt for attempt in self.attempts if not attempt.ok)

    @property
    def ok(self) -> bool:
        """True if no cheat got through, and a right answer pays on every row."""
        return not self.through and not self.blind_rows

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, "blind_rows": self.blind_rows, **asdict(self)}

    def __str__(self) -> str:
        lines = [("cheat", "total", "bar", "row", "verdict")]
        for one in self.attempts:
            total, bar = ("-" if value is None else f"{value:.3f}" for value in (one.total, one.bar))
            place = "" if one.row is None else str(one.row)
            lines.append((one.cheat.replace("\n", "\\n"), total, bar, place, one.verdict))
        tried = sum(one.verdict != NOT_TRIED for one in self.attempts)
        rows = f"{len(self.bars)} row{'s' if len(self.bars) > 1 else ''}"
        found = [f"{tried} cheats on {rows}, {self.num_completions} completions: {len(self.through)} got through"]
        for one in self.through[:_SHOWN]:
            found.append(f"{one.cheat!r}, row {one.row}: {shortened(repr(one.completion))}")
        for row in self.blind_rows[:_SHOWN]:
            found.append(f"row {row}: a right answer earns {self.rights[row]:g} and a wrong one {self.bars[row]:g}")
        if self.undecided_rows:
            shown = ", ".join(map(str, self.undecided_rows[:_SHOWN]))
            found.append(f"left out, golds undecided (see audit): rows {shown}")
        return "\n".join([table(lines), "", *found, "ok" if self.ok else "not ok"])


def redteam(rules: RuleSet, rows: Any, shape: str | None = None, cheats: Mapping[str, str] = CHEATS) -> RedteamReport:
    """Try every cheat, and every join of answers, on every row.

    Rules that count tokens get one made-up token per word and sign.

    Args:
        rules: The set. An exception in a rule is a finding, for any value of `on_error`.
        rows: A `datasets.Dataset` or a list of mappings: `prompt`, the columns that the rules read, and for rules of
            style `completion` a good completion. Each row costs about 170 completions.
        shape: For rules that require a pattern: a completion with `[answer]` and `[text]` in it.
        cheats: Templates to try in addition to the joins, by name.

    Raises:
        ConfigError: A shape without an answer.
        DataError: A column is missing, no rule has a value for a row, or every gold is undecided.
    """
    if shape is not None and "[answer]" not in shape:
        raise ConfigError(f"shape is {shape!r}. Write [answer] for the answer and [text] for the rest.")
    # A cheat that makes a rule raise would end a training run. Here it is a finding.
    rules = replace(rules, on_error="floor")
    rows = data_rows(rows, rules, ("prompt", "completion"))
    golds = [gold_of(rules.rules, row, index) for index, row in enumerate(rows)]
    courts = [_Court(rules, row, golds, shape, index) for index, row in enumerate(rows)]
    decided = [court for court in courts if court.is_decided]
    if not decided:
        raise DataError("Every gold here is undecided, so no cheat differs from another answer. Give other rows.")
    worst = {name: _worst(name, _try(name, text, decided)) for name, text in cheats.items()}
    trios = [three for court in decided if len(three := court.with_rivals(decided)) == 3]
    worst |= {text: _worst(text, _join(text, trios)) for text in JOINS}
    return RedteamReport(
        tuple(worst.values()),
        tuple(court.right for court in courts),
        tuple(court.bar for court in courts),
        sum(court.num_completions for court in courts),
        tuple(court.row for court in courts if not court.is_decided),
    )


def _try(name: str, template: str, courts: Sequence["_Court"]) -> Iterator[Attempt]:
    """Try a cheat on every row on which it can be tried."""
    return filter(None, (court.attempt(name, template) for court in courts))


def _worst(name: str, attempts: Iterable[Attempt]) -> Attempt:
    """Return the attempt that got through, or came closest to it; a cheat without attempts was not tried."""
    not_tried = Attempt(name, None, "", None, None, NOT_TRIED)
    return max(attempts, key=lambda one: (not one.ok, one.excess), default=not_tried)


def _join(template: str, trios: Sequence[Sequence["_Court"]]) -> Iterator[Attempt]:
    """Try a text of the answers of three rows; it gets through if two rows pay it in full."""
    for three in trios:
        text = filled(template, dict(zip("abc", [str(one.gold) for one in three], strict=True)))
        explained = [one.explained([text])[0] for one in three]
        paid: dict[str, list[str]] = {}
        for court, found in zip(three, explained, strict=True):
            for part in filter(court.pays, found.parts):
                paid.setdefault(part.rule, []).append(str(court.row))
        several = (f"rule '{name}' pays it on rows {', '.join(rows)}" for name, rows in paid.items() if len(rows) > 1)
        yield Attempt(template, three[0].row, text, explained[0].total, three[0].bar, next(several, REFUSED))


class _Court:
    """One row, with its bar and the results of cheats."""

    def __init__(
        self, rules: RuleSet, cells: Mapping[str, Any], golds: Sequence[str | None], shape: str | None, row: int
    ):
        self.rules, self.row, self.gold = rules, row, golds[row]
        self.prompt = cells.get("prompt")
        self.columns = {name: cell for name, cell in cells.items() if name not in ("prompt", "completion")}
        known = [] if self.gold is None else [gold for gold in golds if gold is not None]
        self.wrong, self.other = wrong_answers(self.gold or "", known)
        self.topics = topics_of(question_text(self.prompt), completion_text(cells.get("completion")))
        self.num_completions = 0
        self._judging = {rule.name: rule for rule in rules.rules if rule.judges_correctness}
        wrong = self.explained(self._texts_below_bar(cells, shape))
        bar = highest(wrong)
        if bar is None:
            raise DataError(f"Row {row}: no rule has a value there. Take it out, or mend it.\n{wrong[0]}")
        self.bar = bar
        parts = [part for explained in wrong for part in explained.parts]
        self.is_decided = not any(part.status == "undecided" for part in parts)
        # The largest value that each judging rule gives to an honest wrong answer.
        self._values = {rule.name: rule.floor for rule in self._judging.values()}
        for part in parts:
            if part.rule in self._values and part.value is not None:
                self._values[part.rule] = max(self._values[part.rule], part.value)
        self.right = self._highest_right(shape)

    def _texts_below_bar(self, cells: Mapping[str, Any], shape: str | None) -> list[str]:
        """Return the completions that set the bar: empty and honestly wrong; if no rule judges correctness, honest."""
        if self._judging:
            return ["", *honest(self.rules.rules, self.wrong, shape)]
        good = cells.get("completion")
        texts = [] if good is None else [completion_text(good)]
        return [*texts, *honest(self.rules.rules, self.gold or "so", shape)]

    def _highest_right(self, shape: str | None) -> float | None:
        """Return the highest total of a right answer; None without a gold, or if no rule judges correctness."""
        if self.gold is None or not self._judging:
            return None
        ideals = [ideal_of(rule, self.columns, self.row) for rule in self._judging.values()]
        return highest(self.explained([*filter(None, ideals), *honest(self.rules.rules, self.gold, shape)]))

    def pays(self, part: Any) -> bool:
        """Return True if a part of an explanation is the full value of a rule that judges correctness."""
        rule = self._judging.get(part.rule)
        return rule is not None and part.value is not None and part.value >= rule.ceiling

    def with_rivals(self, courts: Sequence["_Court"]) -> list["_Court"]:
        """Return this row and the next two, all with golds that differ as texts and to the rules."""
        found, place = [self], courts.index(self)
        for other in (*courts[place + 1 :], *courts[:place]):
            if self.right is not None and other.right is not None and len(found) < 3:
                found += [other] if all(one.refuses(other) and other.refuses(one) for one in found) else []
        return found

    def refuses(self, other: "_Court") -> bool:
        """Return True if no rule pays for the other row's gold on this row."""
        gold = str(other.gold)
        explained = self.explained([gold, f"The answer is {gold}."])
        return gold_key(gold) != gold_key(str(self.gold)) and not any(
            self.pays(part) for one in explained for part in one.parts
        )

    def attempt(self, name: str, template: str) -> Attempt | None:
        """Try a cheat on this row; return None if it cannot be tried, or might be right by chance."""
        fields = frozenset(_FIELD.findall(template))
        words, tags = " ".join(keywords_of(self.rules.rules)), tags_of(self.rules.rules)
        given = {"wrong": self.wrong, "other": self.other, "words": words}
        given |= {"prompt": question_text(self.prompt), "tags": "".join(f"<{tag}></{tag}>" for tag in tags)}
        given |= dict(zip(_TOPICS, self.topics, strict=False))
        given |= {} if self.gold is None else {"gold": self.gold}
        if fields & _OF_SOME_ROWS - given.keys():
            return None
        completion = filled(template, given)
        # The text may contain the gold by design, or as an option that the prompt lists.
        on_purpose = "gold" in fields or ("prompt" in fields and self.gold in tuple("ABCDE"))
        if self.gold is not None and not on_purpose and holds(completion, self.gold):
            return None
        (explained,) = self.explained([completion])
        return Attempt(name, self.row, completion, explained.total, self.bar, self._verdict(explained))

    def _verdict(self, explained: Explanation) -> str:
        for part in explained.parts:
            if part.status == "error":
                return f"rule '{part.rule}' raised"
            if part.value is not None and part.value > self._values.get(part.rule, part.value) + _ROUNDING:
                return f"rule '{part.rule}' gives {part.value:g}"
        if explained.total is None:
            return "no value: it takes its row out of training"
        return REFUSED if explained.total <= self.bar + _ROUNDING else "more than an honest try"

    def explained(self, completions: Sequence[str]) -> list[Explanation]:
        """Score completions of this row, with explanations."""
        self.num_completions += len(completions)
        columns = {name: [cell] * len(completions) for name, cell in self.columns.items()}
        ids = [token_ids(text) for text in completions]
        return self.rules.explain_all([self.prompt] * len(completions), list(completions), ids, **columns)


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Fill a template; a field's name inside an inserted text stays as it is."""
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def highest(explained: Iterable[Explanation]) -> float | None:
    """Return the largest known total; None if none is known."""
    return max((one.total for one in explained if one.total is not None), default=None)


def holds(completion: str, gold: str) -> bool:
    """Return True if the text contains the answer as a separate word or number."""
    text, answer = plain_numbers(completion), plain_numbers(gold)
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?!\w)", text) is not None


def token_ids(text: str) -> list[int]:
    """Make up token ids, one per word and sign."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in re.findall(r"\w+|[^\w\s]", text)]


# Rows and their honest completions -----------------------------------------------------------------------------------


def gold_of(rules: Sequence[Rule], row: Mapping[str, Any], index: int) -> str | None:
    """Return the row's right answer, without its announcement, from the first rule that can name it."""
    for rule in rules:
        if rule.judges_correctness and applies(rule.when, row):
            ideal = ideal_of(rule, row, index)
            if ideal is not None:
                return bare_answer(ideal)
    return None


def wrong_answers(gold: str, golds: Sequence[str]) -> tuple[str, str]:
    """Return two wrong answers of the gold's kind: with another digit or letter, or else the golds of other rows.

    Example:
        >>> wrong_answers("18", ()), wrong_answers("E", ()), wrong_answers("Paris", ("Rome", "Paris", "7", "Bonn"))
        (('28', '38'), ('A', 'B'), ('Rome', 'Bonn'))
    """
    if digit := re.search("[0-9]", gold):  # never 0, which could make a number shorter or a fraction infinite
        others = ((int(digit[0]) + more) % 9 + 1 for more in (0, 1))
        one, two = (f"{gold[: digit.start()]}{other}{gold[digit.end() :]}" for other in others)
        return one, two
    if gold in tuple(_LETTERS[:5]):
        start = _LETTERS.index(gold) + 1
        return _LETTERS[start], _LETTERS[start + 1]
    texts = [text for text in golds if not re.search("[0-9]", text) and gold_key(text) != gold_key(gold)]
    wrong, other = [*dict.fromkeys(texts), "something else", "nothing of the kind"][:2]
    return wrong, other


def honest(rules: Sequence[Rule], answer: str, shape: str | None) -> Iterator[str]:
    """Yield honest completions that end in this answer, in many shapes and lengths."""
    words = " ".join(keywords_of(rules))
    for num_sentences in _SENTENCES:
        text = " ".join(f"{_OPENERS[n % 8]} {_CLAUSES[n % 11]}." for n in range(num_sentences))
        text = f"{text} {words}".strip()
        for template in _SHAPES:
            yield template.format(text=text, answer=answer)
        if tags := tags_of(rules):
            thoughts = [f"<{tag}>{text or 'So it is.'}</{tag}>" for tag in tags[:-1]]
            yield "\n".join([*thoughts, f"<{tags[-1]}>{answer}</{tags[-1]}>"])
        if shape is not None:
            yield shape.replace("[text]", text or "So it is.").replace("[answer]", answer)


def topics_of(prompt: str, completion: str) -> list[str]:
    """Return eight words of a row's subject: of its completion and not of its prompt, or of the prompt alone.

    The longest are taken, again from the first if there are too few; none from texts without words of five letters.

    Example:
        >>> topics_of("Why do volcanoes erupt?", "Volcanoes erupt as pressure pushes magma upwards.")[:4]
        ['pressure', 'upwards', 'pushes', 'magma']
    """
    new, _ = without_copied(completion, prompt)
    found = dict.fromkeys(_LONG_WORD.findall(new) or _LONG_WORD.findall(prompt))
    longest = sorted(found, key=len, reverse=True)[: len(_TOPICS)]
    return list(islice(cycle(longest), len(_TOPICS)))


def keywords_of(rules: Sequence[Rule]) -> list[str]:
    """Return every keyword that the rules require, as often as they require it."""
    entries: list[Any] = [entry for rule in rules if isinstance(rule, Keywords) for entry in rule.required]
    return [word for entry in entries for word in ([entry] if isinstance(entry, str) else [entry[0]] * entry[1])]


def tags_of(rules: Sequence[Rule]) -> list[str]:
    """Return every tag that the rules require, in their order, each once."""
    return list(dict.fromkeys(tag for rule in rules if isinstance(rule, Tags) for tag in rule.tags))
