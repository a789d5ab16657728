"""Numbers and texts for people: on the progress line, in the final table and in the report."""

import unicodedata
from collections.abc import Collection, Iterable, Sequence


def duration(seconds: float) -> str:
    """Write seconds as `2:10` or `1:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def score(value: float | None) -> str:
    """Write a value with two decimals, never -0.00; None as a dash."""
    return "-" if value is None else f"{value:z.2f}"


def from_to(before: float, after: float) -> str:
    """Write `from 0.42 to 0.55`, with enough decimals to distinguish the two."""
    specs = ("z.2f", "z.3f", "z.4f", ".6g")
    spec = next((one for one in specs if format(before, one) != format(after, one)), specs[0])
    return f"from {before:{spec}} to {after:{spec}}"


def scores(named_values: Iterable[tuple[str, float]]) -> str:
    """Write `reward 0.42  answer 0.31  format 0.55`."""
    return "  ".join(f"{name} {score(value)}" for name, value in named_values)


def short(value: float) -> str:
    """Write a value of any size in a few characters: `0.42`, `128`, `12.5k`, `3.4M`, `4.0e-05`."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e9:
        return f"{value:.1e}"
    for factor, letter in ((1e6, "M"), (1e4, "k")):
        if size >= factor:
            return f"{value / (1e6 if letter == 'M' else 1e3):.1f}{letter}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 0.1 or not size else 4
    return f"{value:z,.{digits}f}"


# Joiners within words and emoji, which some scripts need; all other invisible characters are escaped.
_JOINERS = "\u200c\u200d"


def visible(text: str) -> str:
    """Escape invisible characters, which can control a terminal, reverse text or hide it: data is not trusted."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in "\n\t" or char in _JOINERS or unicodedata.category(char) == "Zs"
        else f"\\u{ord(char):04x}"
        if ord(char) < 0x10000
        else f"\\U{ord(char):08x}"
        for char in text
    )


def cut(text: str, most_chars: int) -> str:
    """Cut the middle of a long text and write its length there; answers are at the end."""
    if len(text) <= most_chars:
        return text
    tail = most_chars // 4
    return f"{text[: most_chars - tail]}\n[... {len(text) - most_chars:,} characters ...]\n{text[-tail:]}"


def without_empty_columns(table: Sequence[Sequence[str]], empty: Collection[str] = ("-",)) -> list[list[str]]:
    """Return a table without the columns whose cells below the header are all among `empty`."""
    header, *rows = table
    used = []
    for column in range(len(header)):
        if any(row[column] not in empty for row in rows):
            used.append(column)
    kept = []
    for row in table:
        kept.append([row[column] for column in used])
    return kept
