"""Rules that tests send to workers."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trl_ext.rewards.base.rule import Row, Rule, Verdict

HEAVY = ("torch", "trl", "transformers", "datasets", "numpy")


@dataclass(frozen=True, slots=True)
class Chars(Rule):
    """The number of characters."""

    def score(self, row):
        return Verdict(float(len(row.text)), "ok", row.text)


@dataclass(frozen=True, slots=True)
class Environment(Rule):
    """What the worker is."""

    def score(self, row):
        heavy = [name for name in HEAVY if name in sys.modules]
        facts = {
            "heavy": heavy,
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
            "oom": open("/proc/self/oom_score_adj").read().strip(),
            "leader": os.getsid(0) == os.getpid(),
        }
        return Verdict(float(os.getpid()), "ok", repr(facts))


@dataclass(frozen=True, slots=True)
class Sleepy(Rule):
    """Sleeps for as many seconds as the text says."""

    floor = -1.0

    def score(self, row):
        time.sleep(float(row.text))
        return Verdict(1.0)


@dataclass(frozen=True)
class Dormant(Rule):
    """Sleeps for an hour, whatever it is to judge."""

    def score(self, row):
        time.sleep(3600)
        return Verdict(1.0)


@dataclass(frozen=True, slots=True)
class Begun(Rule):
    """Makes the file that the text names, and sleeps until it is stopped."""

    floor = -1.0

    def score(self, row):
        Path(row.text).touch()
        time.sleep(3600)
        return Verdict(1.0)


def wait_until(happened):
    """Return once `happened()` is true. A machine that takes longer than two minutes fails the test."""
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Busy(Rule):
    """Computes for as many processor seconds as the text says."""

    floor = -1.0

    def score(self, row):
        end = time.process_time() + float(row.text)
        while time.process_time() < end:
            pass
        return Verdict(1.0)


@dataclass(frozen=True, slots=True)
class Faulty(Rule):
    """Fails as the text says."""

    def score(self, row):
        if row.text == "raise":
            raise KeyError("a bug")
        if row.text == "none":
            return None
        return Verdict(float(row.text))


@dataclass(frozen=True, slots=True)
class Warm(Rule):
    """1.0 where `warm_up` has run before the row, in the process that forked the worker."""

    def warm_up(self):
        os.environ["WARMED_UP_IN"] = str(os.getpid())

    def score(self, row):
        return Verdict(float(os.environ.get("WARMED_UP_IN") == str(os.getppid())))


@dataclass(frozen=True, slots=True)
class Unloadable(Rule):
    """Pickles, and does not load."""

    def __reduce__(self):
        return __import__, ("a_module_that_is_not_there",)

    def score(self, row):
        return Verdict(0.0)


def row(text="", **columns):
    return Row("prompt", text, None, columns)
