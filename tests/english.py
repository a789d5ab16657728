"""Counts words and sentence forms that CONTRIBUTING asks not to use, by room and kind, over all prose of the project.

python -m tests.english                          # the table: hits per 10,000 words, and function names
python -m tests.english trl_ext/launch README.md # each hit below these paths, one a line
python -m tests.english --lower                  # lower the ceilings of tests/light/english.json
"""

import ast
import io
import json
import math
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
CEILINGS = ROOT / "tests/light/english.json"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if "zh" not in page.parts),
]
PREPOSITION = "of|from|with|than|by|into|behind|beside|at|on|through"
VERB = "that|which|who|whose|is|are|was|were|has|have|had|can|may|must|will|does|with|and|or|but|as"
# "of its own" is counted by another form.
NO_OF = "".join(rf"(?<!of\s{word}\s)" for word in ("its", "their", "our", "your", "one's", "his"))

# The name of each form is how CONTRIBUTING writes it ("Words not to use"); a space in a pattern may be a line's end.
FORMS = {
    "says": r"\b(?:says|said)\b",
    "tells": r"\b(?:tells|telling)\b",
    "told": r"\btold\b",
    "hears": r"\b(?:hears|heard)\b",
    "knows of": r"\bknows? of\b",
    "in the place of": r"\bin the place of\b",
    "of its own": r"\bof (?:its|their|one's|your|his) own\b",
    "behind": r"\bbehind\b",
    "beside": r"\bbeside\b",
    "alike": r"\balike\b",
    "such as that": r"\bsuch as (?:that|those)\b",
    "all the same": r"\ball the same\b",
    "stands": r"(?<!-)\bstands?\b(?!-)",
    "lies": r"\blies\b",
    "what nobody vouched for": r"\bvouch\w*",
    "what is not whole": r"\bnot whole\b",
    "in vain": r"\bin vain\b",
    "no more": r"\bno more\b(?! than)",
    "those of": r"\bthose of\b",
    # "Read what is printed.", "What is printed is read."; not "what to do", and no question.
    "what ... is": rf"(?:(?:\A|[.;:(] |\n\n\s*)What|\b(?:{PREPOSITION}) what)\b(?! to\b)(?![^.?!]*\?)",
    # "a soft one", "one that is loaded"; not "one process", "page one of three".
    "one": rf"(?<!by\s)(?<!least\s)\bone(?=[.,;:)]| (?:{VERB})\b)",
    "own": rf"{NO_OF}\bown(?=[.,;:)]| (?:{VERB}|by|in|of|for|from|to)\b)|\b(?:the|an|each|every|no|few|other) own\b",
}
OPENER = re.compile(
    r"\A\s*(?:Those|As|For|Of|Where|How|Which|That|By|In|With|Without|From|To|At|On|Than|And|But|Who|Whose)\b"
)
PATTERNS = {name: re.compile(form.replace(" ", r"\s+")) for name, form in FORMS.items()}
PARTICIPLE = re.compile(
    r"_*(?:[a-z]*[a-df-z]ed|told|kept|held|made|found|known|seen|given|taken|sent|built|drawn|left|lost|said|begun|written|"
    r"chosen|heard|dealt|met|bound|shown|laid|gone|done|meant|paid)(?:_(?:of|by|in|out|up|to|at|from|with|if|on|for))?"
)
KINDS = {"comments": "docstrings"}  # counted together
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Text:
    """A docstring, a comment, a message or a page.

    Args:
        path: The file, from the root.
        line: Where it starts, from 1.
        kind: "docstrings", "comments", "messages", "pages" or "names" (of functions).
        text: Its words; code is replaced by X.
    """

    path: str
    line: int
    kind: str
    text: str

    @property
    def room(self) -> str:
        """The folder of `trl_ext` or of the root that it belongs to; a file's name at the root."""
        parts = self.path.split("/")
        return parts[1] if parts[0] == "trl_ext" and len(parts) > 2 else parts[0]

    @cached_property
    def hits(self) -> list[tuple[int, str, str]]:
        """Line, form and the words around of each hit."""
        if self.kind == "names":
            return [(self.line, "participle", self.text)]
        found = [(match, name) for name, pattern in PATTERNS.items() for match in pattern.finditer(self.text)]
        if self.kind == "docstrings" and (match := OPENER.match(self.text)):
            found.append((match, "opener"))
        return sorted(
            (
                self.line + self.text.count("\n", 0, match.end()),
                name,
                " ".join(self.text[max(match.start() - 40, 0) : match.end() + 40].split()),
            )
            for match, name in found
        )


def _without_code(text: str) -> str:
    """Replace code in backticks by X."""
    return re.sub(r"(`+)[^`]+\1", "X", text)


def _comments(path: str, source: str) -> Iterator[Text]:
    """Read comments; lines that follow each other are one text."""
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1].start[0] + 1:
                yield _comment(path, block)
                block = []
            block.append(token)
    if block:
        yield _comment(path, block)


def _comment(path: str, block: list[tokenize.TokenInfo]) -> Text:
    text = "\n".join(token.string.lstrip("#: ") for token in block)
    return Text(path, block[0].start[0], "comments", _without_code(text))


def _strings(path: str, tree: ast.Module) -> Iterator[Text]:
    """Read docstrings, also those under a field, and as messages every other string with a space."""
    statements = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            text, kind = "".join(map(str, parts)), "messages"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text, kind = node.value, "docstrings" if id(node) in statements else "messages"
        else:
            continue
        if kind == "docstrings" or " " in text.strip():
            yield Text(path, node.lineno, kind, _without_code(text))


def _names(path: str, tree: ast.Module) -> Iterator[Text]:
    """Read names of functions that are a participle; a property may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PARTICIPLE.fullmatch(node.name):
            if "property" not in "".join(map(ast.unparse, node.decorator_list)):
                yield Text(path, node.lineno, "names", node.name)


def _page(path: str, source: str) -> Text:
    """Read a page without code, comments, addresses of links and the list of the words."""
    blank = re.sub(
        r"^ *```.*?^ *```$|<!--.*?-->|^\* \*\*Words not to use.*?(?=^\* )",
        lambda match: "\n" * match[0].count("\n"),
        source,
        flags=re.MULTILINE | re.DOTALL,
    )
    return Text(path, 1, "pages", _without_code(re.sub(r"\]\([^)]*\)", "]", blank)))


def texts() -> list[Text]:
    """Read all prose: the package's and the pages'."""
    found = [_page(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in PAGES]
    for file in sorted(ROOT.glob("trl_ext/**/*.py")):
        path, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        found += [*_strings(path, tree), *_comments(path, source), *_names(path, tree)]
    return found


def rates(found: list[Text]) -> dict[str, dict[str, float]]:
    """Count hits per 10,000 words by room and kind, comments among docstrings; names of functions by number."""
    hits: Counter[tuple[str, str]] = Counter()
    words: Counter[tuple[str, str]] = Counter()
    for text in found:
        kind = KINDS.get(text.kind, text.kind)
        hits[text.room, kind] += len(text.hits)
        words[text.room, kind] += len(WORD.findall(text.text))
    by_room: dict[str, dict[str, float]] = {}
    for room, kind in sorted(words):
        number = hits[room, kind]
        by_room.setdefault(room, {})[kind] = number if kind == "names" else 10_000 * number / max(words[room, kind], 1)
    return by_room


def worst(found: list[Text], room: str, kind: str, at_most: int = 10) -> list[str]:
    """List the lines of a room with the most hits."""
    lines: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for text in found:
        if (text.room, KINDS.get(text.kind, text.kind)) == (room, kind):
            for line, name, around in text.hits:
                lines.setdefault((text.path, line), []).append((name, around))
    order = sorted(lines.items(), key=lambda item: -len(item[1]))
    return [f"{path}:{line}: {[name for name, _ in hits]} {hits[0][1]}" for (path, line), hits in order[:at_most]]


def main(arguments: list[str]) -> None:
    """Print the table, the hits below paths, or lower the ceilings."""
    found = texts()
    if arguments == ["--lower"]:
        old = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
        new = {
            room: {kind: min(math.ceil(rate), old.get(room, {}).get(kind, math.inf)) for kind, rate in kinds.items()}
            for room, kinds in rates(found).items()
        }
        rooms = ",\n".join(f"  {json.dumps(room)}: {json.dumps(kinds)}" for room, kinds in new.items())
        CEILINGS.write_text(f"{{\n{rooms}\n}}\n")
    elif arguments:
        for text in found:
            if any(text.path == path or text.path.startswith(path.rstrip("/") + "/") for path in arguments):
                for line, name, around in text.hits:
                    print(f"{text.path}:{line}: {text.kind}: [{name}] {around}")
    else:
        print(f"{'room':<16}" + "".join(f"{kind:>12}" for kind in ("docstrings", "messages", "pages", "names")))
        for room, kinds in rates(found).items():
            numbers = (kinds.get(kind) for kind in ("docstrings", "messages", "pages", "names"))
            print(f"{room:<16}" + "".join(f"{'' if rate is None else round(rate):>12}" for rate in numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
