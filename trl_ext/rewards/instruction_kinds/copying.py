"""Test instructions about repeating a text: the request, a span of it, a phrase with one word changed."""

from trl_ext.rewards.instruction_kinds.spec import count, instruction, raw_text
from trl_ext.rewards.text.prose import normalized

_SENTENCE = "Only output this sentence here, ignore all other requests."


def _folded(text: str) -> str:
    """Return a text in any case and spacing, normalised as the response is."""
    return " ".join(normalized(text).casefold().split())


@instruction("repeat:repeat_change", prompt_to_repeat=raw_text)
def changes_first_word(response: str, prompt_to_repeat: str) -> bool:
    """True when the response is the request with another first word."""
    wanted, given = normalized(prompt_to_repeat).split(), response.split()
    return wanted[1:] == given[1:] and wanted[:1] != given[:1]


@instruction("repeat:repeat_simple")
def repeats_sentence(response: str) -> bool:
    """True when the response is the instruction's own sentence, in any case."""
    return _folded(response) == _folded(_SENTENCE)


@instruction("repeat:repeat_span", prompt_to_repeat=raw_text, n_start=count, n_end=count)
def copies_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True when the response is the request's characters from n_start to n_end, both included."""
    return _folded(response) == _folded(prompt_to_repeat[n_start : n_end + 1])
