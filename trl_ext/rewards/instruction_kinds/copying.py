"""Test instructions about repeating a text: the request, a span of it, a phrase with one word changed."""

from trl_ext.rewards.instruction_kinds.spec import Instruction, count, divided, positive, raw_text, text
from trl_ext.rewards.text.prose import normalized

_SENTENCE = "Only output this sentence here, ignore all other requests."


def _folded(text: str) -> str:
    """Return a text in any case and spacing, normalised as the response is."""
    return " ".join(normalized(text).casefold().split())


def changes_first_word(response: str, prompt_to_repeat: str) -> bool:
    """True when the response is the request with another first word."""
    wanted, given = normalized(prompt_to_repeat).split(), response.split()
    return wanted[1:] == given[1:] and wanted[:1] != given[:1]


def repeats_sentence(response: str) -> bool:
    """True when the response is the instruction's own sentence, in any case."""
    return _folded(response) == _folded(_SENTENCE)


def copies_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True when the response is the request's characters from n_start to n_end, both included."""
    return _folded(response) == _folded(prompt_to_repeat[n_start : n_end + 1])


def copies_training_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True for the span with or without character n_end: the instruction includes it, its published test does not."""
    return _folded(response) in (_folded(prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


def copies(response: str, prompt_to_repeat: str) -> bool:
    """True when the response is the request, in any case and spacing."""
    return _folded(response) == _folded(prompt_to_repeat)


def copies_often(response: str, prompt_to_repeat: str, N: int) -> bool:
    """True when the response is the request N times, divided by `******`."""
    parts = divided(response, "******")
    return len(parts) == N and all(copies(part, prompt_to_repeat) for part in parts)


def varies_phrase(response: str, phrase: str, small_n: int) -> bool:
    """True when the phrase occurs exactly that often, each time with exactly one of its inner words replaced.

    An occurrence is a stretch between the phrase's first and last word that is as long as the phrase.
    """
    wanted, given = phrase.casefold().split(), response.casefold().replace("\n", " ").split()
    if len(wanted) < 3:
        return False
    given = [word.strip("\"'.,;:!?()*_") for word in given]
    wanted = [word.strip("\"'.,;:!?()*_") for word in wanted]
    found = 0
    for start, word in enumerate(given):
        stretch = given[start : start + len(wanted)] if word == wanted[0] else []
        if len(stretch) == len(wanted) and stretch[-1] == wanted[-1]:
            changed = sum(left != right for left, right in zip(stretch, wanted, strict=True))
            if changed != 1:
                return False
            found += 1
    return found == small_n


_SPAN = {"prompt_to_repeat": raw_text, "n_start": count, "n_end": count}

INSTRUCTIONS = (
    Instruction("repeat:repeat_change", changes_first_word, {"prompt_to_repeat": raw_text}),
    Instruction("repeat:repeat_simple", repeats_sentence),
    Instruction("repeat:repeat_span", copies_span, _SPAN),
    # IFTrain
    Instruction("new:copy_span_idx", copies_training_span, _SPAN),
    Instruction("copy:copy", copies, {"prompt_to_repeat": raw_text}),
    Instruction("copy:copying_simple", copies, {"prompt_to_repeat": raw_text}),
    Instruction("copy:copying_multiple", copies_often, {"prompt_to_repeat": raw_text, "N": positive}),
    Instruction("copy:repeat_phrase", varies_phrase, {"phrase": text, "small_n": positive}),
)
