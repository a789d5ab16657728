"""A house that one finds one's way in: no folder is too long to read, and no name stands for two things."""

import re
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


def private_reads(source: str) -> list[str]:
    """Names such as `trainer._packs` that are read of a trainer by another object."""
    return re.findall(r"(?<!\w)\w*trainer\._(?!_)\w+", source)


def test_nobody_reads_a_private_name_of_a_trainer():
    assert private_reads("trainer._packs\nself._trainer._step\nself._x\ntrainer.forward_loop") == [
        "trainer._packs",
        "_trainer._step",
    ]
    found = {str(path.relative_to(PACKAGE)): private_reads(path.read_text()) for path in MODULES}
    assert not {name: reads for name, reads in found.items() if reads}


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path in MODULES:
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            homes[name].append(str(path.relative_to(PACKAGE)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
