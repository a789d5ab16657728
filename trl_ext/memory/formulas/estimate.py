"""The estimate of a job on a machine, by formulas: GiB per GPU, host memory, seconds of a step, and whether it
fits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware
from trl_ext.memory.formulas import states
from trl_ext.memory.formulas.generation import check_vllm
from trl_ext.memory.formulas.peak import (
    PHASE_WORDS,
    PHASES,
    Footprint,
    Setup,
    footprints,
    room_bytes,
    slack_bytes,
)
from trl_ext.memory.formulas.times import step_seconds
from trl_ext.memory.job import Job, check_batch, check_model
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.units import gib

NEAR_FRAC = 0.04  # of a card: the difference between formulas and measurements
TIGHT_FRAC = 0.01  # a job is tight if it leaves no more than this share of the GiB that it may fill
SHARD_BYTES = 5e9  # largest weights file of save_pretrained and the hub's models


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and time of a job on a machine.

    Args:
        setup: Model, job and machine.
        worst: The largest footprint of each phase.
        host_bytes: Host memory over all processes of the machine, during loading or training, whichever is more.
        seconds: Seconds of one optimizer step, by part.
    """

    setup: Setup
    worst: Mapping[str, Footprint]
    host_bytes: float
    seconds: Mapping[str, float]

    @property
    def job(self) -> Job:
        """The settings."""
        return self.setup.job

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.setup.shape

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return self.setup.hardware

    @property
    def num_gpus(self) -> int:
        """GPUs that train."""
        return self.setup.num_gpus

    @property
    def peak(self) -> Footprint:
        """The largest footprint of all phases."""
        return max(self.worst.values(), key=lambda footprint: footprint.num_bytes)

    @property
    def peak_gib(self) -> float:
        """GiB allocated at the peak, vLLM's share included, without the allocator's slack."""
        return gib(self.peak.num_bytes)

    @property
    def need_bytes(self) -> float:
        """Bytes reserved at the largest footprint: allocated and slack."""
        return max(footprint.num_bytes + slack_bytes(footprint, self.job) for footprint in self.worst.values())

    @property
    def room_bytes(self) -> float:
        """Bytes of a card that a plan may still fill; negative if the job does not fit."""
        shares = [(one.num_bytes, one.terms.get("vLLM", 0.0)) for one in self.worst.values()]
        return min(room_bytes(self.hardware, self.job, whole - vllm) - vllm for whole, vllm in shares)

    @property
    def memory(self) -> str:
        """The two numbers of a card, as all commands print them: "18.9 GiB, 19.4 with slack"."""
        return f"{self.peak_gib:.1f} GiB, {gib(self.need_bytes):.1f} with slack,"

    @property
    def fits(self) -> bool:
        """True if the job fits on the card, and in host memory if that is known."""
        host_gib = self.hardware.host_gib
        in_host = host_gib is None or gib(self.host_bytes) <= host_gib
        return in_host and self.room_bytes >= 0

    @property
    def is_tight(self) -> bool:
        """True if hardly any of the memory that the job may fill is left."""
        return gib(self.room_bytes) < TIGHT_FRAC * self.hardware.fill_gib

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.seconds.values())

    def in_seconds(self, seconds: float | None = None) -> str:
        """Format seconds, of the step if None, with the one digit that can be trusted."""
        rounded = float(f"{self.step_s if seconds is None else seconds:.0e}")
        return f"{rounded:,.0f}" if rounded >= 1 else f"{rounded:.1f}"

    def parts(self) -> str:
        """Phases of a step with their shares, which add up, unlike rounded seconds."""
        shares = {name: seconds / self.step_s for name, seconds in self.seconds.items()}
        return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)

    def num_steps(self, num_rows: int) -> int:
        """Count optimizer steps over all rows once: pairs, or prompts, each with a group of completions."""
        samples = num_rows * self.job.num_generations * self.job.oversample if self.job.generates else num_rows
        return math.ceil(samples / self.job.global_batch)

    def hours(self, num_rows: int) -> float:
        """Hours of one pass over all rows."""
        return self.num_steps(num_rows) * self.step_s / 3600

    def terms_gib(self, phase: str) -> dict[str, float]:
        """GiB of a phase's largest footprint by term, slack included."""
        footprint = self.worst[phase]
        terms = {**footprint.terms, "slack": slack_bytes(footprint, self.job)}
        return {name: gib(value) for name, value in terms.items()}

    def reason(self) -> str:
        """Return why the job does not fit, as a sentence without its full stop; "" if it fits."""
        hardware, need, peak = self.hardware, gib(self.need_bytes), self.peak_gib
        card, where = hardware.card.usable_gib, PHASE_WORDS[self.peak.phase]
        near = f"; within {NEAR_FRAC:.0%} of the card: try it" if need <= card * (1 + NEAR_FRAC) else ""
        if peak > card:
            digits = 0 if peak - card >= 1 else 1
            return f"{peak:.{digits}f} GiB {where} on a card with {card:.{digits}f} GiB usable{near}"
        if self.room_bytes < 0:
            usable = hardware.usable if need <= card else f"{card:.1f} GiB usable"
            return f"{peak:.1f} GiB {where}, {need:.1f} with slack, on a card with {usable}{near}"
        if not self.fits:
            return f"{gib(self.host_bytes):.0f} GiB of host memory on a machine with {hardware.host_gib:.0f} GiB"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, for JSON."""
        return {
            "fits": self.fits,
            "peak_gib": round(self.peak_gib, 3),
            "reserved_gib": round(gib(self.need_bytes), 3),
            "usable_gib": round(self.hardware.card.usable_gib, 3),
            "headroom_frac": self.hardware.headroom_frac,
            "peak_phase": self.peak.phase,
            "peak_moment": self.peak.what,
            "phases": _round({phase: gib(footprint.num_bytes) for phase, footprint in self.worst.items()}, 3),
            "terms": {phase: _round(self.terms_gib(phase), 3) for phase in self.worst},
            "host_gib": round(gib(self.host_bytes), 1),
            "step_s": round(self.step_s, 2),
            "step_parts_s": _round(self.seconds, 2),
            "assumed": self.hardware.card.assumed,
            "basis": "estimated",
        }


def _round(values: Mapping[str, float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in values.items()}


def estimate(job: Job, shape: ModelShape, hardware: Hardware) -> Estimate:
    """Estimate a job's memory and time on a machine.

    Args:
        job: Settings of the training run.
        shape: The model's sizes.
        hardware: The GPUs and machines.

    Raises:
        ConfigError: The job does not go with the model or the number of GPUs, or vLLM cannot start.
    """
    check_model(job, shape)
    check_batch(job, hardware.num_gpus)
    check_vllm(shape, job, hardware)
    check_precision(job, hardware)
    return quick_estimate(job, shape, hardware)


def check_precision(job: Job, hardware: Hardware) -> None:
    """Raise ConfigError if the job needs bf16 and the card does not compute in it."""
    card = hardware.card
    if not (card.has_bf16 or job.fp16):
        capability = ".".join(map(str, card.capability))
        raise ConfigError(
            f"{card.name}, compute capability {capability}, has no bf16. Train in fp16: --fp16 of `trl-ext plan`, or "
            "fp16: true and bf16: false in a recipe; or take a card from Ampere (A10, A100, RTX 30) on."
        )


def quick_estimate(job: Job, shape: ModelShape, hardware: Hardware) -> Estimate:
    """Estimate a job without the checks: the search tries hundreds of settings that are known to go together."""
    setup = Setup.of(shape, job, hardware)
    worst: dict[str, Footprint] = {}
    for footprint in sorted(footprints(setup), key=lambda one: (PHASES.index(one.phase), -one.num_bytes)):
        worst.setdefault(footprint.phase, footprint)
    return Estimate(setup, worst, host_bytes(setup), step_seconds(setup))


def host_bytes(setup: Setup) -> float:
    """Host memory of a machine: while each process loads the whole model (under ZeRO-3 its share, for 4 bits one file
    of it; under FSDP2 trained weights are cast to fp32 there), or of offloaded state, whichever is more."""
    job = setup.job
    processes = 1 if job.zero_stage == 3 and not job.fsdp and job.method != "qlora" else setup.num_gpus
    largest = max(engine.frozen or engine.trained for engine in setup.engines)
    is_wide = job.dtype == "float32" or (job.fsdp and job.method == "full")
    loading = float((4 if is_wide else 2) * largest)
    if job.method == "qlora":
        # bitsandbytes quantises on the card while transformers reads one file at a time, of 5 GB from save_pretrained.
        loading = min(loading, SHARD_BYTES)
    loading *= processes
    return max(loading, sum(states.host_bytes(engine) for engine in setup.engines)) / setup.hardware.num_machines
