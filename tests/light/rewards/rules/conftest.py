"""For rules that ask a server: a module's `SERVER` serves its tests, and failed calls are soon made again."""

from contextlib import nullcontext

import pytest

from trl_ext.rewards.rules import async_rule


@pytest.fixture(scope="module", autouse=True)
def served(request):
    with getattr(request.module, "SERVER", nullcontext()):
        yield


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(async_rule, "_FIRST_PAUSE_S", 0.001)
