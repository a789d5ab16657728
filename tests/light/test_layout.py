"""A house that one finds one's way in: no folder is too long to read, and no name stands for two things."""

import ast
from collections import defaultdict

from tests.conftest import ROOT

PACKAGE = ROOT / "trl_ext"
MOST_SIBLINGS = 14
LONGER = {"rewards/rules"}  # one file a rule
NO_SIBLINGS = {"__init__.py", "py.typed", "__pycache__"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_a_folder_has_at_most_14_siblings():
    sizes = {}
    for folder in {path.parent for path in MODULES}:
        siblings = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - NO_SIBLINGS
        sizes[str(folder.relative_to(PACKAGE))] = len(siblings)
    assert {name: size for name, size in sizes.items() if size > MOST_SIBLINGS}.keys() <= LONGER


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
