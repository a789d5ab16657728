"""What `trl-ext dryrun` says the allocator reserves: by its replica where the twin has counted, else by a share.

vLLM's share lies beside it on the card, so it is taken off the cap and added to what is told.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl_ext.memory.formulas.peak import slack_share
from trl_ext.memory.job import Job
from trl_ext.memory.units import GIB, gib
from trl_ext.twin.driver import TwinResult
from trl_ext.twin.trace import LOAD

REPLICA, SHARE = "allocator replica", "share"
UNKNOWN_SHARE = 0.1  # of a model that the formulas do not know


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a run allocates on one card.

    Args:
        phases_gib: Allocated at the peak of each phase, vLLM's share included; loading is left out.
        vllm_gib: vLLM's share.
        usable_gib: What the card has for tensors.
        job: The job, for the formula of the slack; None for a model that the formulas do not know.
        result: The twin's answer, with a trace or a refusal.
    """

    phases_gib: Mapping[str, float]
    vllm_gib: float
    usable_gib: float
    job: Job | None
    result: TwinResult

    @property
    def cap_bytes(self) -> int:
        """What the card has for PyTorch's allocator."""
        return int((self.usable_gib - self.vllm_gib) * GIB)


@dataclass(frozen=True, slots=True)
class Reserved:
    """What one policy of the allocator takes from the card.

    Args:
        expandable: True for `expandable_segments:True`, False for native segments.
        phases_gib: Reserved in each phase, vLLM's share included; loading is left out. Where it does not fit, what
            it would take on a card without an end.
        basis: Where the number of the worst phase is from: "allocator replica" or "share".
        fits: True if the run fits on the card, with the cache emptied where that is needed.
        num_retries: How often the cache is emptied, in the steps that the twin runs.
    """

    expandable: bool
    phases_gib: Mapping[str, float]
    basis: str
    fits: bool
    num_retries: int

    @property
    def peak_gib(self) -> float:
        return max(self.phases_gib.values())

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return {
            "fits": self.fits,
            "expandable_segments": self.expandable,
            "reserved_gib": round(self.peak_gib, 3),
            "reserved_basis": self.basis,
            "alloc_retries": self.num_retries,
        }


def reserved_beside_the_other(allocated: Allocated, expandable: bool) -> dict[str, Any]:
    """What the run's policy reserves, with its phases, and under "other_policy" what the other policy would."""
    own, other = reserved(allocated, expandable), reserved(allocated, not expandable)
    phases = {name: round(value, 3) for name, value in own.phases_gib.items()}
    return {**own.as_dict(), "phases": phases, "other_policy": other.as_dict()}


def reserved(allocated: Allocated, expandable: bool) -> Reserved:
    """Reserve by the replica what the twin has counted, and by a share what it has not, such as generation."""
    by_share = _by_share(allocated, expandable)
    if allocated.result.trace is None:
        fits = max(by_share.values()) <= allocated.usable_gib
        return Reserved(expandable, by_share, SHARE, fits, num_retries=0)
    found = allocated.result.reserved(expandable)
    under_cap = found
    if found.peak_bytes > allocated.cap_bytes:
        under_cap = allocated.result.reserved(expandable, allocated.cap_bytes)
        found = found if under_cap.failed_in else under_cap
    told = {name: gib(num) + allocated.vllm_gib for name, num in found.reserved_bytes.items() if name != LOAD}
    rest = {name: value for name, value in by_share.items() if name not in told}
    fits = not under_cap.failed_in and all(value <= allocated.usable_gib for value in rest.values())
    basis = REPLICA if max(told.values()) >= max(rest.values(), default=0.0) else SHARE
    return Reserved(expandable, told | rest, basis, fits, under_cap.num_retries)


def _by_share(allocated: Allocated, expandable: bool) -> dict[str, float]:
    job = allocated.job
    share = UNKNOWN_SHARE if job is None else slack_share(replace(job, expandable_segments=expandable))
    return {name: value + share * (value - allocated.vllm_gib) for name, value in allocated.phases_gib.items()}


# The policy of a run ---------------------------------------------------------------------------------------------


def segments_expand(recipe: str) -> bool:
    """True if the recipe's run has `expandable_segments:True`: by its plan, which lies beside it and whose launch line
    sets the variable; else by the environment, the recipe's block `env`, or `memory`, which sets it if nobody else
    does."""
    import yaml

    from trl_ext.doctor.variables import NEW_NAME, OLD_NAME
    from trl_ext.memory.files.plan import read_plan
    from trl_ext.memory.files.settings import ALLOCATOR
    from trl_ext.scripts.arguments import split_config_flag

    path = Path(split_config_flag(["--config", recipe])[1])
    if path.name == "recipe.yaml" and (path.parent / "plan.json").is_file():
        return read_plan(path.parent).job.expandable_segments
    keys = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    by_memory = ALLOCATOR if keys.get("memory") else {}
    variables = {**by_memory, **os.environ, **(keys.get("env") or {})}
    words = (str(variables.get(name, "")).replace(" ", "").lower() for name in (OLD_NAME, NEW_NAME))
    return any("expandable_segments:true" in word for word in words)
