"""Out of memory as PyTorch's allocators tell it: is it one, in which phase it rose, what is known of the card."""

import re
from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size

from trl_ext.errors import TrlExtError
from trl_ext.memory.units import GIB, gib

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocator of PyTorch raised this: CUDA's and its kin, MPS's, or the CPU's."""
    if isinstance(error, TrlExtError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(error)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Memory of this process's card, in GiB; None where it is not known.

    Args:
        allocated, reserved: By PyTorch, now.
        total: Of the card.
        asked: What could not be had, from the error.
    """

    allocated: float | None = None
    reserved: float | None = None
    total: float | None = None
    asked: float | None = None


def numbers_of(error: BaseException) -> Numbers:
    """Read the card while the error is on its way."""
    asked = asked_gib(str(error))
    if not torch.cuda.is_available():
        return Numbers(asked=asked)
    return Numbers(
        allocated=gib(torch.cuda.memory_allocated()),
        reserved=gib(torch.cuda.memory_reserved()),
        total=gib(torch.cuda.mem_get_info()[1]),
        asked=asked,
    )


def asked_gib(message: str) -> float | None:
    """GiB that torch's sentence says it tried to allocate; None if it says nothing."""
    found = _ASKED.search(message)
    return None if found is None else float(found[1]) * _UNITS[found[2]] / GIB


# Where it rose -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A phase of training in which memory can run out.

    Args:
        words: For the sentence "Out of memory ...".
        phase: The planner's name for it, "" where it has none.
        functions: The phase is on when one of these is.
        why_whole: Why a micro-batch cannot be halved here.
    """

    words: str
    phase: str = ""
    functions: tuple[str, ...] = ()
    why_whole: str = "only a forward is taken again"


FORWARD = Place("in the forward", "update", ("compute_loss", "_train_critic"))
BACKWARD = Place("in the backward", "update", ("backward",), "in the backward gradients are already on their way")
# The first one of which a function is on: a backward within an evaluation is none, a step of DeepSpeed's is in what
# accelerate calls a backward.
PLACES = (
    Place("in the rehearsal", "update", ("rehearse",), "it is there to find this out"),
    Place("while evaluating", "score", ("evaluate", "evaluation_loop")),
    Place("while saving", "", ("_save_checkpoint", "save_model")),
    Place("while generating", "generate", ("_generate",)),
    Place("while scoring", "score", ("_calculate_rewards", "_generate_and_score_completions")),
    Place("at the optimizer step", "step", ("step", "on_train_begin", "create_optimizer")),
    BACKWARD,
    FORWARD,
)
ELSEWHERE = Place("outside the training step")


def place_of(error: BaseException) -> Place:
    """The phase in which the error rose, read off the functions that it came through."""
    names, traceback = set(), error.__traceback__
    while traceback is not None:
        names.add(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return next((place for place in PLACES if not names.isdisjoint(place.functions)), ELSEWHERE)
