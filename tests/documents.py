"""The fenced blocks of the README, of the pages under docs/ and of notebooks' text, with what each needs to run."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
PAGES = [*ROOT.glob("README*.md"), *sorted(ROOT.glob("docs/**/*.md")), *NOTEBOOKS]
# `<!-- needs: KIND, REASON -->` before a block: this machine cannot run it.
NEEDS = {
    "card": "a GPU",
    "clone": "files of the repository that no wheel has",
    "hub": "a model or data of the hub that stand for themselves, and not for their shape",
    "service": "a server or an account of somebody else's",
    "theirs": "another project's program",
}
BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<kind>\w+), (?P<reason>[^>]+?) -->\n+)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: Path of the page, from the root.
        line: Line of its first line in the page, from 1.
        language: What stands behind the fence; "" is a shell block as "bash" is.
        text: Its lines.
        kind, reason: What this machine lacks to run it, a key of NEEDS, and why; "" where it can.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str
    reason: str

    @property
    def is_shell(self) -> bool:
        """Whether its lines are commands."""
        return self.language in ("", "bash")

    def commands(self) -> list[str]:
        """Its commands: comments left out, lines that end in a backslash joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def text_of(page: Path) -> str:
    """A page's text: of a notebook its cells of text, and what its code gives to the shell as blocks."""
    if page.suffix != ".ipynb":
        return page.read_text(encoding="utf-8")
    texts = []
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        commands = [line[1:] for line in source.splitlines() if line.startswith("!")]
        texts.append(
            source if cell["cell_type"] == "markdown" else "".join(f"```\n{line}\n```\n" for line in commands)
        )
    return "\n".join(texts)


def blocks_of(page: Path) -> list[Block]:
    """Read a page's blocks, in order."""
    text, found = text_of(page), []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        kind, reason = match["kind"] or "", match["reason"] or ""
        found.append(Block(str(page.relative_to(ROOT)), line, match["language"], match["text"], kind, reason))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
