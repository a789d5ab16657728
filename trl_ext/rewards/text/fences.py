"""Find the fenced blocks of a Markdown text, and the Python answer among them."""

import re

_PYTHON = ("python", "py", "python3")
_LIST_MARK = re.compile(r"(?:[-*+]|[0-9]{1,9}[.)])[ \t]+(?=```|~~~)")
_STATEMENT = re.compile(r"^\s*+(?:def|class|import|from|for|while|if|try|with|return|print|async|@)\b|=", re.MULTILINE)
_DEFINED = re.compile(r"\b(?:def|class)[ \t]+([^\W\d]\w*+)")
_IMPORT = re.compile(r"^[ \t]*+(?:import|from)\b.*+", re.MULTILINE)
_ASSIGNED = re.compile(r"^[ \t]*+([^\W\d]\w*+)[ \t]*+=(?!=)", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w.])([^\W\d]\w*+)[ \t]*+\(")
_WORD = re.compile(r"\w++")


def fenced_blocks(text: str, unclosed: bool = False) -> list[tuple[str, str]]:
    """Return the closed blocks of a text, in order, in one pass; with `unclosed` also an open block at the end.

    A block is the word after its opening fence, in lower case, and its lines without the indent of the first line: a
    block in a list is indented. A fence opens with three or more backticks at the start of a line, or after a list's
    mark, or with tildes before a word; a line of at least as many marks closes it.
    """
    found = []
    fence, language = "", ""
    block: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if not fence:
            stripped = _LIST_MARK.sub("", stripped, count=1) if stripped[:1] in "-*+0123456789" else stripped
            run = stripped[: len(stripped) - len(stripped.lstrip(stripped[:1]))] if stripped[:1] in "`~" else ""
            if len(run) >= 3 and (run[0] == "`" or run != stripped):  # A line of tildes alone is an ornament.
                fence, language, block = run, stripped[len(run) :].strip().lower(), []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            found.append((language, "\n".join(_without_indent(block))))
            fence = ""
        else:
            block.append(line)
    return fenced_blocks(f"{text}\n{fence}") if unclosed and fence else found


def _without_indent(block: list[str]) -> list[str]:
    """Return lines without the indent of the first line that is not blank, or with less if they have less."""
    first = next((line for line in block if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    return [line[min(indent, len(line) - len(line.lstrip())) :] for line in block] if indent else block


def python_answer(text: str, unclosed: bool = False) -> str | None:
    """Return the code of the last Python block that is not a usage example of an earlier block, or None.

    Without a block marked as Python, blocks without a language count, those that look like Python first. An example
    calls a name that an earlier block defines and it does not, or it is a transcript (`>>>`).

    Example:
        >>> python_answer("```python\\ndef f(x):\\n    return x\\n```\\nUse it:\\n```python\\nprint(f(3))\\n```")
        'def f(x):\\n    return x'
    """
    blocks = fenced_blocks(text, unclosed)
    marked = [code for language, code in blocks if language in _PYTHON]
    if not marked:
        plain = [code for language, code in blocks if not language]
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
