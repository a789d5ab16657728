"""Named plans, frozen: the six cases that users asked about, and one for every size of card.

A preset is a job with the number that it was chosen for, and beside it the obvious settings with the number that
refuses them. A test computes both again and holds them within 2 %. All numbers are estimated. Lengths and batch are
the preset's; for others ask `plan`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.formulas.estimate import Estimate, estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.planner import Plan, Plans, Refusal
from trl_ext.memory.planner.search import Search
from trl_ext.memory.tables import read_table


@dataclass(frozen=True, slots=True)
class Preset:
    """A frozen plan.

    Args:
        purpose: What it is for, in a line.
        trainer, model, gpus: As in `trl-ext plan`.
        settings: Fields of `Job`.
        peak_gib: Estimated peak a GPU.
        obvious: Fields that turn the job into what one would have tried first; empty if there is nothing to say.
        obvious_gib: Its estimated peak, more than the card has.
        why: Why the obvious one does not fit, in a sentence.
    """

    purpose: str
    trainer: str
    model: str
    gpus: str
    settings: Mapping[str, Any]
    peak_gib: float
    obvious: Mapping[str, Any] = field(default_factory=dict)
    obvious_gib: float = 0.0
    why: str = ""

    @property
    def job(self) -> Job:
        return Job(self.trainer, **self.settings)

    def plan(self) -> Plan:
        """The preset as a plan, computed now."""
        return Plan(self._estimate(self.job))

    def obvious_estimate(self) -> Estimate:
        """Estimate the obvious settings."""
        return self._estimate(replace(self.job, **self.obvious))

    def _estimate(self, job: Job) -> Estimate:
        return estimate(job, find_shape(self.model), parse_gpus(self.gpus))


PRESETS: dict[str, Preset] = {name: Preset(**fields) for name, fields in read_table("presets").items()}


def preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        ConfigError: There is none; with the nearest names.
    """
    if name not in PRESETS:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.3) or list(PRESETS)[:3]
        raise ConfigError(f"There is no preset '{name}'. Nearest: {', '.join(near)}.")
    return PRESETS[name]


def as_plans(name: str) -> Plans:
    """The preset called `name` as an answer of the planner, with the obvious settings as what it refuses.

    Raises:
        ConfigError: There is none; with the nearest names.
    """
    one = preset(name)
    found = one.plan()
    given = frozenset({"trainer", *one.settings})
    search = Search(found.job, given, found.estimate.shape, found.estimate.hardware)
    refused = (Refusal(one.obvious_estimate(), one.why),) if one.obvious else ()
    return Plans(search, frozenset(), (found,), refused)
