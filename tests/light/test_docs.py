"""What the documents name exists: files, functions in them, the documents themselves, and the site made of them."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.documents import BLOCKS, NOTEBOOKS, text_of
from trl_ext.resources import __version__

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PATH = r"`((?:trl_ext|tests|benchmarks|docs|notebooks|accelerate_configs|deepspeed_configs)/[\w/.]*|examples/\w+\.py)`"
MOST_SIBLINGS = 14
# A page in Chinese has the name of the English page, in another folder.
CHINESE = {page.name: page for page in PAGES if page.is_relative_to(ROOT / "docs/zh")}
ENGLISH = {page.name: page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in CHINESE.values()}
PAIRS = {name: (ENGLISH[name], CHINESE[name]) for name in sorted(ENGLISH.keys() & CHINESE.keys())}


@cache
def defined_in(file: str) -> set[str]:
    """Names that a module defines: functions, methods, classes and constants."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_every_path_and_link_that_a_page_names_leads_somewhere():
    texts = {page: text_of(page) for page in [*PAGES, *NOTEBOOKS]}
    named = [(page, path) for page, text in texts.items() for path in re.findall(PATH, text)]
    assert not [(page.name, path) for page, path in named if not (ROOT / path).exists()]
    links = [(page, link) for page, text in texts.items() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


@pytest.mark.slow
def test_a_name_beside_a_file_is_defined_there():
    """Of the form `trl_ext/packing/plan.py` (`plan_rows`), and `CARDS` of `trl_ext/memory/cards.py`."""
    text = "\n".join(page.read_text() for page in PAGES)
    named = re.findall(r"`(trl_ext/[\w/]+\.py)`\s+\(`(\w+)`", text)
    named += [(file, name) for name, file in re.findall(r"`(\w+)`\s+of\s+`(trl_ext/[\w/]+\.py)`", text)]
    assert not [(file, name) for file, name in named if name not in defined_in(file)]


def test_the_changelog_begins_with_the_version_that_is_built():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0].partition(" - ")[0] == __version__


def test_the_readme_links_every_notebook_and_the_first_page_every_page():
    text = (ROOT / "README.md").read_text()
    assert not [path.name for path in ROOT.glob("notebooks/*.ipynb") if f"(notebooks/{path.name})" not in text]
    links = re.findall(r"\]\(([^)#:]+)", (ROOT / "docs/index.md").read_text())
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"index.md"}
    assert not {page for page in pages if not page.startswith("zh/")} - set(links)


def links_of(page: Path, first_line: int = 0) -> set[Path]:
    """Files that the page links, from this line on."""
    text = "\n".join(page.read_text().splitlines()[first_line:])
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)", text)}


def test_a_page_in_both_languages_links_the_other_one_below_its_title():
    assert len(PAIRS) == len(CHINESE) and len(ENGLISH) == len(set(PAGES) - {*CHINESE.values(), *ROOT.glob("*.md")})
    for english, chinese in PAIRS.values():
        for page, word, other in ((english, "中文", chinese), (chinese, "English", english)):
            assert page.read_text().splitlines()[1] == f"[{word}]({os.path.relpath(other, page.parent)})", page


def test_a_chinese_page_links_to_chinese_pages():
    english = {one for one, _ in PAIRS.values()}
    assert not links_of(ROOT / "README_zh.md") & english
    for page in CHINESE.values():
        assert not links_of(page, 2) & english, page  # the second line leads to the English page


def test_the_chinese_first_page_links_every_chinese_page():
    assert set(CHINESE.values()) <= links_of(CHINESE["index.md"]) | {CHINESE["index.md"]}


def test_gib_of_a_chinese_page_stand_on_english_pages_or_in_recipes():
    known = "".join(path.read_text() for path in (*ENGLISH.values(), *ROOT.glob("trl_ext/recipes/*.yaml")))
    for page in (page for page in CHINESE.values() if "GiB" in page.read_text()):
        text = re.sub(r"```text.*?```", "", page.read_text(), flags=re.DOTALL)  # what commands print
        assert set(re.findall(r"\b\d+\.\d\b", text)) <= set(re.findall(r"\b\d+\.\d\b", known)), page


@pytest.mark.parametrize("name", ["from_openrlhf.md", "from_verl.md", "held_out.md", "index.md"])
def test_recipes_of_a_chinese_page_are_those_of_the_english_one(name):
    english, chinese = (
        [yaml.safe_load(block.text) for block in BLOCKS if block.language == "yaml" and ROOT / block.page == page]
        for page in PAIRS[name]
    )
    assert english and english == chinese


def test_keys_for_rows_of_other_projects_are_those_of_the_english_page():
    key = r"`((?:answer_pattern|columns|first_option|prompt_template): [^`]+)`"
    english, chinese = (set(re.findall(key, page.read_text())) for page in PAIRS["data.md"])
    assert len(chinese) > 10 and not chinese - english


def test_the_tables_of_remedies_have_equal_figures():
    rows = (
        [line for line in page.read_text().splitlines() if line[:3] in ("| +", "| o", "| 或")]
        for page in PAIRS["oom.md"]
    )
    english, chinese = ([line.strip("| ").split("|")[-2:] for line in lines] for lines in rows)
    assert len(english) > 25 and english == chinese


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_its_outputs_no_path_of_a_machine_and_no_private_name(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    said = json.dumps([output.get("text", output.get("data", output)) for cell in cells for output in cell["outputs"]])
    assert not re.findall(r"/(?:home|root|tmp|work|usr|opt|mnt|Users)/\S*", said)
    assert not re.findall(r"(?<!\bos)\._[a-z]\w*|import _\w+", "".join("".join(cell["source"]) for cell in cells))


def test_a_folder_of_pages_has_at_most_14_siblings():
    folders = [
        ROOT / "docs",
        *(path for path in ROOT.glob("docs/**/*") if path.is_dir() and path.name != "__pycache__"),
    ]
    pages = {folder: [path for path in folder.iterdir() if path.name != "__pycache__"] for folder in folders}
    assert not [str(folder) for folder, inside in pages.items() if len(inside) > MOST_SIBLINGS]


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path):
    """A page that is not in the navigation, and a link that leads nowhere, are errors."""
    pytest.importorskip("mkdocs")
    # Word for word: with --quiet, for example, mkdocs counts no warning.
    (line,) = re.findall(r"^docs:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    build = line.replace("$(BIN)/python", shlex.quote(sys.executable))
    build += f" --site-dir {shlex.quote(str(tmp_path / 'site'))}"
    done = subprocess.run(build, cwd=ROOT, env=os.environ, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert not re.findall(r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+stylesheet[^>]+https?:""", text)


def test_no_message_names_a_page_which_a_wheel_does_not_hold():
    """Docstrings may: who reads them has the source."""
    named = []
    for path in sorted((ROOT / "trl_ext").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named += [
            (path.name, node.value)
            for node in texts
            if id(node) not in docstrings and re.search(r"docs/\S+\.md", node.value)
        ]
    named += [
        path.name for path in (ROOT / "trl_ext").rglob("*.jinja") if re.search(r"docs/\S+\.md", path.read_text())
    ]
    assert not named
