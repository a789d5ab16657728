"""Read PyTorch's out-of-memory errors: recognize it, find the phase that raised it, and its numbers."""

import re
from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size

from trl_ext.errors import TrlExtError
from trl_ext.memory.units import GIB

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocator of PyTorch raised the error: a GPU's (CUDA, MPS and others) or the CPU's."""
    if isinstance(error, TrlExtError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(error)


def asked_gib(message: str) -> float | None:
    """Return the GiB that PyTorch tried to allocate, from its message; None if the message has no number."""
    found = _ASKED.search(message)
    return None if found is None else float(found[1]) * _UNITS[found[2]] / GIB


@dataclass(frozen=True, slots=True)
class Place:
    """A phase of training in which memory can run out."""

    words: str  # continuation of the sentence "Out of memory ..."
    phase: str = ""  # the planner's name for it; "" if it has none
    functions: tuple[str, ...] = ()  # the phase is active if one of them is in the traceback
    why_whole: str = "only a forward is taken again"  # why a micro-batch cannot be halved here


FORWARD = Place("in the forward", "update", ("compute_loss", "train_on"))
BACKWARD = Place("in the backward", "update", ("backward",), "in the backward gradients are already on their way")
# The first match counts: a backward within an evaluation is an evaluation, and DeepSpeed's optimizer step runs inside
# accelerate's `backward`.
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
    """Return the phase in which the error was raised, from the functions in its traceback."""
    names, traceback = set(), error.__traceback__
    while traceback is not None:
        names.add(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return next((place for place in PLACES if not names.isdisjoint(place.functions)), ELSEWHERE)
