"""Are the required words there, and the forbidden ones not."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row, Rule, Verdict, text_tuple
from trl_ext.rewards.words import contains_word


@dataclass(frozen=True, slots=True)
class Keywords(Rule):
    """Share of the required keywords that occur; 0.0 when a forbidden one does.

    A keyword is plain text, one or more words. Chinese, Japanese, Korean and Thai keywords match anywhere, because
    their texts do not show where a word ends.

    Args:
        required, forbidden: Keywords.
        ignore_case: Whether "Cat" is "cat".
        whole_word: Whether "cat" must stand alone, outside of "cathedral".

    Example:
        >>> Keywords(required=("because", "so")).score(Row(None, "Because of rain.", None, {})).value
        0.5
    """

    required: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    ignore_case: bool = True
    whole_word: bool = True

    def check(self) -> None:
        required = text_tuple(self, "required", self.required)
        forbidden = text_tuple(self, "forbidden", self.forbidden)
        if not required and not forbidden:
            raise RuleError(f"Rule '{self.name}' has no keywords. Give required=(...) or forbidden=(...).")
        both = sorted({self._fold(word) for word in required} & {self._fold(word) for word in forbidden})
        if both:
            raise RuleError(f"Rule '{self.name}': {both} are both required and forbidden. Take them out of one list.")
        object.__setattr__(self, "required", required)
        object.__setattr__(self, "forbidden", forbidden)

    def score(self, row: Row) -> Verdict:
        text = self._fold(row.text)
        found = [word for word in self.forbidden if self._occurs(word, text)]
        if found:
            return Verdict(self.floor, "ok", f"forbidden: {', '.join(found)}")
        missing = [word for word in self.required if not self._occurs(word, text)]
        share = 1.0 - len(missing) / len(self.required) if self.required else 1.0
        return Verdict(share, "ok", f"missing: {', '.join(missing)}" if missing else "all there")

    def _fold(self, text: str) -> str:
        return text.casefold() if self.ignore_case else text

    def _occurs(self, word: str, text: str) -> bool:
        word = self._fold(word)
        return contains_word(text, word) if self.whole_word else word in text
