"""With every pair of settings of each config, a run that is stopped and resumed is the one that was not, to the bit.

The settings are those of `settings.py`: all booleans and all choices, a stream instead of rows, adapters. A value that
no run takes, and two that do not go together, are printed with the sentence that says so.

    KILLS_MINUTES=30 pytest tests/lanes/kills

starts no run of a trainer after 30 minutes: the pairs that it covered are equal, and it prints how many they were.
"""

import json
import os
import subprocess

import pytest

from tests.lanes.kills import settings
from tests.lanes.kills.pairs import FILE, LIMIT_S, Found
from tests.multi.launching import environment
from tests.multi.warm import warm_python

ENDING_S = 1800  # for the run during which the limit passes, and for what in it does not come to its end


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of each trainer's settings; the three search at the same time."""
    folder, searches = tmp_path_factory.mktemp("pairs"), {}
    for kind in settings.CONFIGS:
        command = [warm_python(), "-m", "tests.lanes.kills.pairs", kind, str(folder / kind)]
        with (folder / f"{kind}.log").open("w") as log:
            searches[kind] = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    for kind, search in searches.items():
        assert search.wait(LIMIT_S + ENDING_S) == 0, (folder / f"{kind}.log").read_text()[-3000:]
    return {kind: Found(**json.loads((folder / kind / FILE).read_text())) for kind in settings.CONFIGS}


@pytest.mark.parametrize("kind", settings.CONFIGS)
def test_every_pair_of_settings_resumes_exactly(kind, found, capsys):
    one = found[kind]
    with capsys.disabled():
        print(f"\n{one.summary(kind)}")
        for name, sentence in (one.refused | one.broken).items():
            print(f"  {name}: {sentence}")
    assert one.different == {}
    assert one.covered > 0
    if "KILLS_MINUTES" not in os.environ:
        assert one.covered == one.num_pairs > 1000


def test_the_settings_that_once_differed_are_among_them():
    values = settings.values_of("grpo")
    assert values["sync_ref_model"] == values[settings.STREAM] == [True]
