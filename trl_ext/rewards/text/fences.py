"""The fenced code blocks of a text, and the one that is its answer in Python."""

import re
from dataclasses import dataclass

_PYTHON = ("python", "py", "python3")
_LIST_MARK = re.compile(r"(?:[-*+]|[0-9]{1,9}[.)])[ \t]+(?=```)")
_STATEMENT = re.compile(r"^\s*+(?:def|class|import|from|for|while|if|try|with|return|print|async|@)\b|=", re.MULTILINE)
_DEFINED = re.compile(r"\b(?:def|class)[ \t]+([^\W\d]\w*+)")
_IMPORT = re.compile(r"^[ \t]*+(?:import|from)\b.*+", re.MULTILINE)
_ASSIGNED = re.compile(r"^[ \t]*+([^\W\d]\w*+)[ \t]*+=(?!=)", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w.])([^\W\d]\w*+)[ \t]*+\(")
_WORD = re.compile(r"\w++")


@dataclass(frozen=True, slots=True)
class Fenced:
    """A closed block: the word behind its opening fence, in lower case, and its lines without their common indent."""

    language: str
    code: str


def fenced_blocks(text: str) -> list[Fenced]:
    """Return the closed blocks of a text, in order, in one pass over its lines.

    A fence is three or more backticks that open a line, with or without a list's mark before them; one of at least as
    many and nothing else closes it. Lines lose as much indent as the first of them has: a block in a list is indented.
    """
    found = []
    opened, language = 0, ""
    block: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if not opened:
            stripped = _LIST_MARK.sub("", stripped, count=1) if stripped[:1] in "-*+0123456789" else stripped
        ticks = len(stripped) - len(stripped.lstrip("`"))
        if not opened and ticks >= 3:
            opened, language, block = ticks, stripped[ticks:].strip().lower(), []
        elif opened and ticks >= opened and ticks == len(stripped):
            first = next((one for one in block if one.strip()), "")
            indent = len(first) - len(first.lstrip())
            block = [one[min(indent, len(one) - len(one.lstrip())) :] for one in block] if indent else block
            found.append(Fenced(language, "\n".join(block)))
            opened = 0
        elif opened:
            block.append(line)
    return found


def python_answer(text: str) -> str | None:
    """Return the code of the last block that is Python and no example of how an earlier one is used; None without one.

    Blocks without a language count where none is marked as Python, and where they look like it. A block is an example
    when it calls what an earlier block defines and it does not, or when it is a transcript (`>>>`).

    Example:
        >>> python_answer("```python\\ndef f(x):\\n    return x\\n```\\nUse it:\\n```python\\nprint(f(3))\\n```")
        'def f(x):\\n    return x'
    """
    blocks = fenced_blocks(text)
    marked = [block.code for block in blocks if block.language in _PYTHON]
    if not marked:
        plain = [block.code for block in blocks if not block.language]
        marked = [code for code in plain if _STATEMENT.search(code)] or plain
    answer = None
    known: set[str] = set()
    for code in marked:
        if answer is None or not _is_example(code, known):
            answer = code
            known |= set(_DEFINED.findall(code))
    return answer


def _is_example(code: str, known: set[str]) -> bool:
    if code.lstrip().startswith(">>>"):
        return True
    called = known.intersection(_CALLED.findall(code))
    if not called:
        return False
    own = {*_DEFINED.findall(code), *_ASSIGNED.findall(code)}
    imported = {word for line in _IMPORT.findall(code) for word in _WORD.findall(line)}
    return not called <= own | imported
