"""Environment variables that slow training down, break it, or decide its memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trl_ext.doctor.facts import Facts
from trl_ext.doctor.finding import Finding, note, ok
from trl_ext.memory.files.settings import ALLOCATOR

_ON = r"1|true|yes|y|on"
_OFF = r"0|false|no|n|off"


@dataclass(frozen=True, slots=True)
class Harm:
    """A variable's values that hurt on a single machine.

    Args:
        name: The variable.
        values: Pattern of the whole value, in any case.
        what: The effect, a sentence.
        advice: What to do, a sentence.
        needs_peer: It hurts only if cards reach each other's memory.
    """

    name: str
    values: str
    what: str
    advice: str
    needs_peer: bool = False


_UNSET = "Unset it."
HARMS = (
    Harm(
        "NCCL_P2P_DISABLE",
        _ON,
        "Cards then talk through host memory although they reach each other directly.",
        "Unset it; it is for cards without peer access, such as RTX 4090 with an old driver.",
        needs_peer=True,
    ),
    Harm("NCCL_SHM_DISABLE", _ON, "Processes of one machine then talk over the network stack.", _UNSET),
    Harm("NCCL_NET_DISABLE_INTRA", _ON, "It is for debugging networks.", _UNSET),
    Harm("NCCL_ALGO|NCCL_PROTO", r".+", "It takes the choice by message size away from NCCL.", _UNSET),
    Harm("NCCL_MAX_NCHANNELS|NCCL_MAX_CTAS", r"[1-3]", "So few channels leave the link idle.", _UNSET),
    Harm("NCCL_BUFFSIZE", r"\d{8,}", "NCCL holds such a buffer per channel and card, outside any plan.", _UNSET),
    Harm("NCCL_SOCKET_IFNAME", r"=?lo", "It binds NCCL to the loopback, so several machines never meet.", _UNSET),
    Harm("NCCL_DEBUG", r"info|trace", "Every rank prints every ring.", "Set NCCL_DEBUG=WARN when all is well."),
    Harm(
        "TORCH_NCCL_BLOCKING_WAIT|NCCL_BLOCKING_WAIT",
        _ON,
        "The CPU then waits for every collective, so compute and communication do not overlap.",
        _UNSET,
    ),
    Harm(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING|NCCL_ASYNC_ERROR_HANDLING",
        _OFF,
        "When a rank dies, the others then wait for ever.",
        _UNSET,
    ),
    Harm("TORCH_DISTRIBUTED_DEBUG", r"detail", "Every collective is checked by a second collective.", _UNSET),
    Harm("CUDA_LAUNCH_BLOCKING", _ON, "The CPU then waits for every kernel; it is for debugging.", _UNSET),
    Harm("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "Every tensor then asks the driver for memory.", _UNSET),
)
OLD_NAME, NEW_NAME = next(iter(ALLOCATOR)), "PYTORCH_ALLOC_CONF"
WATCHED = (
    *(name for harm in HARMS for name in harm.name.split("|")),
    *(OLD_NAME, NEW_NAME, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each variable that hurts here; one "ok" if none does."""
    found = []
    for harm in HARMS:
        applies = facts.has_peer_access is not False or not harm.needs_peer
        for name in harm.name.split("|") if applies else ():
            value = facts.environment.get(name)
            if value is not None and re.fullmatch(harm.values, value.strip(), re.IGNORECASE):
                found.append(note("environment", f"{name}={value}. {harm.what}", harm.advice))
    yield from found or [ok("environment", "No variable that is known to hurt NCCL or CUDA is set.")]


def check_allocator(facts: Facts) -> Iterator[Finding]:
    """Judge whether PyTorch's allocator may grow its segments, under the variable that vLLM also reads."""
    if not facts.gpus:
        return
    setting = f"{OLD_NAME}={ALLOCATOR[OLD_NAME]}"
    if _expands(facts, OLD_NAME):
        yield ok("allocator", f"{OLD_NAME} has expandable_segments:True.")
    elif _expands(facts, NEW_NAME):
        what = f"expandable_segments is on under {NEW_NAME} alone, which vLLM's sleep mode does not read."
        yield note("allocator", what, f"Set {setting} instead.")
    else:
        what = "expandable_segments is off; fragmentation then costs up to a tenth of a card (estimated)."
        yield note("allocator", what, f"export {setting}; the launch line of a plan sets it.")


def _expands(facts: Facts, name: str) -> bool:
    return "expandable_segments:true" in facts.environment.get(name, "").replace(" ", "").lower()
