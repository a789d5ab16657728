"""What the formulas look at, and the moments that they tell: a point of a step with its bytes by term."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas import engines as roles
from trl_ext.memory.formulas import states
from trl_ext.memory.formulas.engines import Part
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape

Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a step where memory may peak.

    Args:
        phase: One of PHASES.
        what: For the reader: "backward of the top layer".
        terms: Bytes by term; they add up.
    """

    phase: str
    what: str
    terms: Terms

    @property
    def num_bytes(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Case:
    """What the formulas look at: model, job and machine, and which models the run therefore holds."""

    shape: ModelShape
    job: Job
    hardware: Hardware
    parts: Sequence[Part]
    copies: Sequence[roles.FrozenCopy]

    @classmethod
    def of(cls, shape: ModelShape, job: Job, hardware: Hardware) -> "Case":
        return cls(shape, job, hardware, roles.parts(shape, job), roles.frozen_copies(shape, job))

    @property
    def engines(self) -> list[states.Engine]:
        """What is trained, in one list."""
        return [part.engine for part in self.parts]

    @property
    def num_gpus(self) -> int:
        return self.hardware.num_gpus


def plus(*parts: Terms) -> Terms:
    """Terms added by name, those of zero left out."""
    total: Terms = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return {name: value for name, value in total.items() if value}
