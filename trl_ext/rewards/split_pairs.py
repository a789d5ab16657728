r"""Split preference pairs into the prompt and the completions that rules read.

Rules read a prompt and a completion. If both sides hold the whole text (implicit prompt), they are split:

    messages           the completion is the last assistant turn, with its tool calls and tool results
    dialogue as text   both sides hold "\n\nHuman:" and "\n\nAssistant:"; the completion follows the last "Assistant:"
    other text         the prompt is the common beginning, cut back to its last whole line, else to its last whole word

A single line in a script without spaces has no whole word: the whole text is then the completion.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import DataError

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN_ROLES = ("assistant", "tool")


@dataclass(frozen=True, slots=True)
class SplitPair:
    """A pair as rules read it, the chosen side first.

    `same_prompt` is False if the sides answer different prompts and cannot be compared.
    """

    prompts: tuple[Any, Any]
    completions: tuple[Any, Any]
    same_prompt: bool = True


def split_batch(batch: Mapping[str, list[Any]]) -> list[SplitPair]:
    """Split the pairs of a batch; without a column `prompt`, prompts are implicit."""
    sides = zip(batch["chosen"], batch["rejected"], strict=True)
    if "prompt" in batch:
        prompted = zip(batch["prompt"], sides, strict=True)
        return [SplitPair((prompt, prompt), completions) for prompt, completions in prompted]
    return [split_implicit(chosen, rejected) for chosen, rejected in sides]


def split_implicit(chosen: Any, rejected: Any) -> SplitPair:
    """Cut both sides into prompt and completion; a missing side is a completion without a prompt.

    Prompts of texts differ without a common beginning, or if dialogues differ before the last reply.

    Example:
        >>> split_implicit("How many?\\nA: 18", "How many?\\nA: 17").completions
        ('A: 18', 'A: 17')
    """
    if chosen is None or rejected is None:
        return SplitPair((None, None), (chosen, rejected), same_prompt=False)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if all(mark in side for mark in (_HUMAN, _ASSISTANT) for side in (chosen, rejected)):
            cuts = [side.rindex(_ASSISTANT) + len(_ASSISTANT) for side in (chosen, rejected)]
            same = chosen[: cuts[0]] == rejected[: cuts[1]]
        else:
            # Without the blank ends, so that equal sides keep their last line as completion.
            first, second = chosen.rstrip(), rejected.rstrip()
            differ = (place for place, (one, two) in enumerate(zip(first, second, strict=False)) if one != two)
            common = first[: next(differ, min(len(first), len(second)))]
            ends = (common.rfind(mark) + 1 for mark in ("\n", " "))
            cuts = [next((end for end in ends if common[:end].strip()), 0)] * 2
            same = bool(common.strip())
    elif isinstance(chosen, list) and isinstance(rejected, list):
        cuts = []
        for side in (chosen, rejected):  # The last assistant turn follows the last user or system message.
            openers = (i + 1 for i, message in reversed([*enumerate(side)]) if message.get("role") not in _TURN_ROLES)
            cuts.append(next(openers, 0))
        same = bare(chosen[: cuts[0]]) == bare(rejected[: cuts[1]])
    else:
        kinds = f"'chosen' holds a {type(chosen).__name__} and 'rejected' a {type(rejected).__name__}"
        raise DataError(f"{kinds}. Give text on both sides, or message lists on both.")
    prompts, completions = (chosen[: cuts[0]], rejected[: cuts[1]]), (chosen[cuts[0] :], rejected[cuts[1] :])
    return SplitPair(prompts, completions, same)


def bare(value: Any) -> Any:
    """Return the value to compare: text without blank ends, messages without the empty fields that Arrow adds."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Mapping):
        return {key: bare(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [bare(item) for item in value]
    return value
