"""Settings for every test: offline, one thread for tiny models, and where the real data lies."""

import gc
import os
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest

from tests import compiled_helpers

# Before any import of transformers, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Trainers in tests leave no report, except where a test asks for it: a thousand of them would take minutes.
os.environ.setdefault("TRL_EXT_REPORT", "0")

ROOT = Path(__file__).parent.parent

# A shell starts what runs in its background with Ctrl-C ignored, and the processes that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A trainer asks fifty times which packages are there, which is a third of its making: a package is read once.
Distribution.from_name = classmethod(cache(Distribution.from_name.__func__))
Distribution.metadata = property(cache(Distribution.metadata.fget))

# Each run draws other examples. A machine may be busy, and then a single one takes long.
hypothesis.settings.register_profile("few", max_examples=40, deadline=None)
hypothesis.settings.register_profile("many", max_examples=1000, deadline=None)  # --hypothesis-profile=many
hypothesis.settings.load_profile("few")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what collection has made: thousands of tests, and whole libraries."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of xdist: it has the environment of the process that started it
    stack = ExitStack()
    store = ROOT / ".pytest_cache" / "compiled_helpers" / compiled_helpers.name_of_versions()
    folder = stack.enter_context(compiled_helpers.own_folder(store))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    compiled_helpers.quick_compiler(store)
    config.add_cleanup(stack.close)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of the tests by folder, where there are at least a minute of them."""
    seconds: Counter[str] = Counter()
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("::")[0].split("/")[:-1][:3])] += report.duration
    if (total := seconds.total()) >= 60:
        terminalreporter.section("seconds by folder")
        for folder, spent in seconds.most_common():
            terminalreporter.write_line(f"{spent:7.0f}  {spent / total:4.0%}  {folder}")


@pytest.fixture(scope="session")
def twin():
    """Answers simulations of the memory twin, each in a process of its own, which is a fork of one that is warm."""
    from tests.multi.warm import warm_python
    from tests.twin import run_apart

    def run(simulation):
        with patch.object(sys, "executable", str(warm_python())):
            return run_apart(simulation)

    return run


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real data, from TRL_EXT_DATA; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("TRL_EXT_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data here: set TRL_EXT_DATA to a folder that holds it")
    return folder
