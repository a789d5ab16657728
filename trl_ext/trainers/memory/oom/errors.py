"""In which phase of training an exception rose, read off the functions that it came through."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Place:
    """A phase.

    Args:
        words: For the sentence "Out of memory ...".
        phase: The planner's name for it, "" where it has none.
        functions: The phase is on when one of these is.
        why_whole: Why a micro-batch cannot be halved here.
    """

    words: str
    phase: str = ""
    functions: frozenset[str] = frozenset()
    why_whole: str = "only a forward is taken again"


def _place(words: str, phase: str, functions: str, why_whole: str = "only a forward is taken again") -> Place:
    return Place(words, phase, frozenset(functions.split()), why_whole)


FORWARD = _place("in the forward", "update", "compute_loss _critic_step")
BACKWARD = _place("in the backward", "update", "backward", "in the backward gradients are already on their way")
# The first one of which a function is on: a backward within an evaluation is none, a step of DeepSpeed's is in what
# accelerate calls a backward.
PLACES = (
    _place("in the rehearsal", "update", "rehearse rehearsal", "it is there to find this out"),
    _place("while evaluating", "score", "evaluate evaluation_loop"),
    _place("while saving", "", "_save_checkpoint save_model"),
    _place("while generating", "generate", "_generate"),
    _place("while scoring", "score", "_calculate_rewards _generate_and_score_completions"),
    _place("at the optimizer step", "step", "step start_critic create_optimizer"),
    BACKWARD,
    FORWARD,
)
ELSEWHERE = _place("outside the training step", "", "")


def place_of(error: BaseException) -> Place:
    """Where the error rose."""
    names = set(_functions(error.__traceback__))
    return next((place for place in PLACES if names & place.functions), ELSEWHERE)


def _functions(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_name
        traceback = traceback.tb_next
