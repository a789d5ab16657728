"""A rule that imports something heavy in `score`: once for all rows, whatever the import takes."""

import os
import sys
from dataclasses import dataclass

import pytest
from plain_rules import Chars, row

from trl_ext.rewards.base.rule import Rule, Verdict
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool

LIMITS = {"cpu_s": 0.1, "memory_mib": 128}
# Leaves a thread and memory behind, as NumPy does; takes longer than a row may; takes more memory than a row may.
LIBRARIES = {
    "leaves_threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n",
    "takes_long": "import time\nwhile time.process_time() < 0.4: pass\n",
    "takes_memory": "import mmap\nKEPT = mmap.mmap(-1, 2**28)\n",
}


@dataclass(frozen=True, slots=True)
class Importing(Rule):
    """1.0, with the library that the text names; the detail says whether it was there already."""

    def score(self, row):
        there = row.text in sys.modules
        __import__(row.text)
        return Verdict(1.0, "ok", f"there: {there}")


@dataclass(frozen=True, slots=True)
class ImportsAndHangs(Rule):
    """Never ends, and imports something first."""

    floor = -1.0

    def score(self, row):
        __import__(row.text)
        while True:
            pass


@pytest.fixture
def library(request, tmp_path, monkeypatch):
    name = f"library_that_{request.param}"
    (tmp_path / f"{name}.py").write_text(LIBRARIES[request.param])
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("library", "workers"), [("leaves_threads", 1), ("takes_long", 3), ("takes_memory", 1)], indirect=["library"]
)
def test_an_import_in_score_is_paid_for_once(library, workers):
    with WorkerPool(Limits(**LIMITS, workers=workers, chunk=4)) as pool:
        verdicts = pool.run([(Importing(), row(library))] * 40)
        assert {verdict.status for verdict in verdicts} == {"ok"}, verdicts
        # Each worker that began without it may have imported it; all that were forked later had it.
        assert [verdict.detail for verdict in verdicts].count("there: False") <= workers + 1
        assert pool.restarts <= 2 * workers + 1
        *found, missing = pool.run([*[(Importing(), row(library))] * 8, (Importing(), row("surely_not_installed"))])
        assert [verdict.detail for verdict in found] == ["there: True"] * 8
        assert (missing.value, missing.status) == (None, "error") and "surely_not_installed" in missing.detail


@pytest.mark.skipif(not os.environ.get("TRL_EXT_THOROUGH"), reason="takes seconds; set TRL_EXT_THOROUGH=1")
@pytest.mark.parametrize("library", ["leaves_threads"], indirect=True)
def test_a_row_that_imports_and_hangs_is_stopped_all_the_same(library):
    with WorkerPool(Limits(cpu_s=0.05, workers=2)) as pool:
        tasks = [(ImportsAndHangs(), row(library))] * 6 + [(Chars(), row("abc"))] * 6
        verdicts = pool.run(tasks)
        assert {(verdict.value, verdict.status) for verdict in verdicts[:6]} == {(-1.0, "timeout")}
        assert [verdict.value for verdict in verdicts[6:]] == [3.0] * 6
